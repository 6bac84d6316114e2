//! Time against rows, and against adapters, as an SVG drawing.

use std::collections::BTreeMap;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::report::{Line, Report};

const SIZE: (u32, u32) = (1100, 480);
const COLOURS: [RGBColor; 6] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 39, 40),
    RGBColor(44, 160, 44),
    RGBColor(148, 103, 189),
    RGBColor(255, 127, 14),
    RGBColor(90, 90, 90),
];

/// Points of one curve: what is on the x axis, microseconds, the floor's microseconds.
type Curves = BTreeMap<String, Vec<(f64, f64, f64)>>;

/// What went wrong in drawing.
type Fault = Box<dyn std::error::Error>;

/// The report's cases as two charts: over rows, and over adapters where a number of rows has several.
pub fn svg(report: &Report) -> Result<String, Fault> {
    let mut out = String::new();
    {
        let area = SVGBackend::with_string(&mut out, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let title = format!("{}, {}: LoRA work of a step, {}", report.device(), report.backend(), report.shapes());
        let area = area.titled(&title, ("sans-serif", 18))?;
        let (left, right) = area.split_horizontally(SIZE.0 / 2);
        chart(&left, "rows", by_rows(&report.lines))?;
        chart(&right, "adapters in the batch", by_adapters(&report.lines))?;
        area.present()?;
    }
    Ok(out)
}

/// A curve for each rank and way of spreading adapters.
fn by_rows(lines: &[Line]) -> Curves {
    curves(lines, |line| {
        let spread = match line.adapters_used {
            1 => "one adapter".to_owned(),
            used if used == line.case.rows => "an adapter a row".to_owned(),
            used => format!("{used} adapters"),
        };
        (format!("rank {}, {spread}", line.case.rank), line.case.rows)
    })
}

/// A curve for each rank and number of rows.
fn by_adapters(lines: &[Line]) -> Curves {
    let mut curves =
        curves(lines, |line| (format!("rank {}, {} rows", line.case.rank, line.case.rows), line.adapters_used));
    curves.retain(|_, points| points.len() > 1);
    curves
}

fn curves(lines: &[Line], place: impl Fn(&Line) -> (String, u32)) -> Curves {
    let mut curves = Curves::new();
    for line in lines.iter().filter(|line| !line.case.small_last) {
        let (name, x) = place(line);
        curves.entry(name).or_default().push((f64::from(x), line.median_us, line.floor_us));
    }
    for points in curves.values_mut() {
        points.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    }
    curves
}

/// One chart, both axes logarithmic: measured times as lines with dots, floors as thin lines.
fn chart(area: &DrawingArea<SVGBackend<'_>, Shift>, x_name: &str, curves: Curves) -> Result<(), Fault> {
    let points = || curves.values().flatten();
    let (last, low, high) = points().fold((2.0, f64::MAX, 0.0), |(last, low, high): (f64, f64, f64), point| {
        (last.max(point.0), low.min(point.1.min(point.2)), high.max(point.1.max(point.2)))
    });
    if high <= 0.0 {
        return Ok(());
    }
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d((0.9..last * 1.1).log_scale(), (low * 0.8..high * 1.3).log_scale())?;
    chart
        .configure_mesh()
        .x_desc(x_name)
        .y_desc("us; thin: the floor")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.0}"))
        .draw()?;
    for (i, (name, points)) in curves.into_iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        let measured: Vec<_> = points.iter().map(|point| (point.0, point.1)).collect();
        chart.draw_series(LineSeries::new(points.iter().map(|point| (point.0, point.2)), colour.mix(0.4)))?;
        chart.draw_series(measured.iter().map(|point| Circle::new(*point, 3, colour.filled())))?;
        chart
            .draw_series(LineSeries::new(measured, colour.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    Ok(())
}
