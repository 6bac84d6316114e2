//! The base model's own products of routed layers, by the vendor's matrix library: what experts cost a host's engine.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use lorapool::adapter::ExpertLinear;
use lorapool::backend::{GpuBackend, Product};
use lorapool::{DType, Error, Region, Result};

use super::rig::{self, Times};
use super::routed::Routed;

/// More bytes of weights than any cache keeps until the next layer.
const CACHE: u64 = 256 << 20;

/// Of a layer's linears which one, its experts, outputs and inputs, and which of several copies.
type Weight = [usize; 5];

/// Times them for `tokens` tokens whose experts `seed` draws, in one captured graph: a product of groups for each linear, a
/// group for each expert. Inputs lie row by row, sorted by expert. Layers share weights, as few as a cache can't keep.
///
/// # Errors
/// [`Error::Unavailable`] where there is no such library; what it and the device's memory say, for [`unavailable`].
pub fn time(
    gpu: &dyn GpuBackend,
    routed: &Routed,
    tokens: u32,
    seed: u64,
    act: DType,
    samples: usize,
) -> Result<Times> {
    // First without any: weights are gigabytes.
    gpu.capture_products(act, &[])?;
    let matrix = |rows: u64, width: usize| rig::matrix(gpu, rows, width as u32, act, "base model");
    let rows = u64::from(tokens) * u64::from(routed.top_k);
    let counts: Vec<Vec<u32>> = routed.draw(tokens, seed).iter().map(|routes| routes.counts()).collect();
    let bytes = |linear: &ExpertLinear| (linear.experts * linear.in_features * linear.out_features) as u64 * act.size();
    let mut weights: BTreeMap<Weight, Region> = BTreeMap::new();
    let mut activations: BTreeMap<(bool, usize), Region> = BTreeMap::new();
    // Each product's rows by expert, linear and weight.
    let mut list = Vec::new();
    for (i, layer) in routed.layers.iter().enumerate() {
        let copies = CACHE.div_ceil(layer.linears().map(bytes).sum::<u64>().max(1)).max(1);
        for (at, linear) in layer.linears().enumerate() {
            let (outputs, inputs) = (linear.out_features, linear.in_features);
            let key = [at, linear.experts, outputs, inputs, i % copies as usize];
            if let Entry::Vacant(vacant) = weights.entry(key) {
                vacant.insert(matrix((linear.experts * outputs) as u64, inputs)?);
            }
            for (is_output, width) in [(false, inputs), (true, outputs)] {
                if let Entry::Vacant(vacant) = activations.entry((is_output, width)) {
                    vacant.insert(matrix(rows, width)?);
                }
            }
            list.push((&counts[i], linear, key));
        }
    }
    let products = list.iter().map(|(rows, linear, key)| Product {
        rows,
        in_features: linear.in_features as u32,
        out_features: linear.out_features as u32,
        x: &activations[&(false, linear.in_features)],
        w: &weights[key],
        y: &activations[&(true, linear.out_features)],
    });
    let products: Vec<Product<'_>> = products.collect();
    let graph = gpu.capture_products(act, &products)?;
    rig::time(gpu, &|| graph.replay(), samples)
}

/// What the library or the device's memory can't take, as a time that there is not.
pub fn unavailable(gpu: &dyn GpuBackend, error: Error) -> Error {
    match error {
        Error::Driver { .. } | Error::OutOfMemory { .. } => {
            Error::Unavailable { backend: gpu.caps().backend, reason: error.to_string() }
        }
        other => other,
    }
}
