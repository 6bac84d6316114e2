//! The queue: submissions, their tickets, and what may be reused or freed once they are done.

#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use ash::vk;

use super::device::Device;
use super::encoder::Frame;
use super::memory::{Arena, Memory, RawBuffer};
use super::{driver, lock};
use crate::backend::{Caps, Ticket};
use crate::contract::{Kernel, Spec};
use crate::error::{Error, Result};

/// What waits for the device before it is destroyed.
pub(super) enum Garbage {
    Buffer(RawBuffer),
    Frame(Frame),
}

/// All that one device's backend, regions, pipelines and graphs share. The last of them drops it.
pub(super) struct Shared {
    pub(super) caps: Caps,
    pub(super) memory: Memory,
    pub(super) layout: vk::PipelineLayout,
    pub(super) pipelines: Mutex<HashMap<(Kernel, Spec), vk::Pipeline>>,
    /// Host-visible buffer that reads pass through, made by the first read.
    pub(super) readback: Mutex<Option<RawBuffer>>,
    /// Signals each submission's ticket.
    timeline: vk::Semaphore,
    queue: Mutex<Queue>,
    /// Held around each use of the `VkQueue`: the host's own lock on an adopted device.
    queue_lock: Arc<Mutex<()>>,
    pub(super) device: Device,
}

#[derive(Default)]
struct Queue {
    /// Ticket of the last submission.
    last: u64,
    in_flight: VecDeque<(u64, Frame)>,
    free: Vec<Frame>,
    free_arenas: Vec<Arena>,
    /// Recordings begun and not yet submitted or given up, by number.
    open: Vec<u64>,
    next_recording: u64,
    /// Dropped while recordings numbered below were open, which may name it: it gets a ticket when they close.
    limbo: Vec<(u64, Garbage)>,
    /// To destroy once its ticket is done.
    garbage: VecDeque<(u64, Garbage)>,
}

impl Shared {
    pub(super) fn new(device: Device, caps: Caps, queue_lock: Arc<Mutex<()>>) -> Result<Self> {
        let memory = Memory::new(&device, caps.memory)?;
        let push = [vk::PushConstantRange::default().stage_flags(vk::ShaderStageFlags::COMPUTE).size(8)];
        let info = vk::PipelineLayoutCreateInfo::default().push_constant_ranges(&push);
        // SAFETY: `info` is complete; the device is alive.
        let layout =
            unsafe { device.raw.create_pipeline_layout(&info, None) }.map_err(driver("vkCreatePipelineLayout"))?;
        let mut kind = vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
        let info = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
        // SAFETY: `info` is complete; timelineSemaphore is enabled.
        let timeline = unsafe { device.raw.create_semaphore(&info, None) }.map_err(|error| {
            // SAFETY: nothing was made from it.
            unsafe { device.raw.destroy_pipeline_layout(layout, None) };
            driver("vkCreateSemaphore")(error)
        })?;
        Ok(Self {
            caps,
            memory,
            layout,
            pipelines: Mutex::default(),
            readback: Mutex::default(),
            timeline,
            queue: Mutex::default(),
            queue_lock,
            device,
        })
    }

    /// The last ticket whose work has finished.
    pub(super) fn completed(&self) -> Result<Ticket> {
        // SAFETY: the semaphore lives as long as `self` and is a timeline.
        unsafe { self.device.raw.get_semaphore_counter_value(self.timeline) }
            .map(Ticket)
            .map_err(driver("vkGetSemaphoreCounterValue"))
    }

    /// Blocks until `ticket`'s work has finished.
    pub(super) fn wait(&self, ticket: Ticket) -> Result<()> {
        let last = lock(&self.queue).last;
        if ticket.0 > last {
            return Err(Error::shape("ticket", ticket.0, format!("at most {last}, the last one submitted")));
        }
        let (semaphores, values) = ([self.timeline], [ticket.0]);
        let info = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        // SAFETY: the semaphore lives as long as `self`; its value was submitted, so the wait ends.
        unsafe { self.device.raw.wait_semaphores(&info, u64::MAX) }.map_err(driver("vkWaitSemaphores"))
    }

    /// A command buffer to record to, with an empty arena.
    pub(super) fn begin(self: &Arc<Self>) -> Result<Recording> {
        let (number, frame) = {
            let mut queue = lock(&self.queue);
            queue.reclaim(self)?;
            let number = queue.open_recording();
            (number, queue.free.pop())
        };
        // From here on the guard closes the recording, whatever happens.
        let mut recording = Recording { shared: self.clone(), number, frame };
        if recording.frame.is_none() {
            recording.frame = Some(Frame::new(&self.device)?);
        }
        Ok(recording)
    }

    /// Sends a finished command buffer.
    fn send(&self, queue: &mut Queue, commands: vk::CommandBuffer) -> Result<Ticket> {
        let ticket = queue.last + 1;
        let (commands, semaphores, values) = ([commands], [self.timeline], [ticket]);
        let mut timeline = vk::TimelineSemaphoreSubmitInfo::default().signal_semaphore_values(&values);
        let submit = [vk::SubmitInfo::default()
            .command_buffers(&commands)
            .signal_semaphores(&semaphores)
            .push_next(&mut timeline)];
        let _turn = lock(&self.queue_lock);
        // SAFETY: the command buffer is executable and, if it may be pending, was made for simultaneous use;
        // no one else uses the queue now (the locks held); each ticket is larger than those before.
        unsafe { self.device.raw.queue_submit(self.device.queue, &submit, vk::Fence::null()) }
            .map_err(driver("vkQueueSubmit"))?;
        queue.last = ticket;
        Ok(Ticket(ticket))
    }

    /// Sends a graph's command buffer once more.
    ///
    /// # Safety
    /// - `commands` is executable, was begun for simultaneous use, and goes to [`Shared::retire`] afterwards.
    pub(super) unsafe fn replay(&self, commands: vk::CommandBuffer) -> Result<Ticket> {
        let mut queue = lock(&self.queue);
        queue.reclaim(self)?;
        self.send(&mut queue, commands)
    }

    /// Destroys `garbage` once no work that may name it is left.
    pub(super) fn retire(&self, garbage: Garbage) {
        let mut queue = lock(&self.queue);
        let number = queue.next_recording;
        queue.limbo.push((number, garbage));
        // An error is the device's loss: then it stays until the device goes.
        queue.reclaim(self).ok();
    }

    /// Opens a recording on a command buffer of the host's: an arena for it, and its number.
    pub(super) fn begin_for_host(&self) -> Result<Arena> {
        let mut queue = lock(&self.queue);
        queue.reclaim(self)?;
        Ok(queue.free_arenas.pop().unwrap_or_default())
    }

    /// Takes an arena back.
    ///
    /// # Safety
    /// - No device work that may still run was recorded with it.
    pub(super) unsafe fn end_for_host(&self, mut arena: Arena) {
        // SAFETY: by the contract of this function.
        unsafe { arena.rewind(self) };
        lock(&self.queue).free_arenas.push(arena);
    }

    /// # Safety
    /// - No device work that may still run touches it.
    unsafe fn destroy(&self, garbage: Garbage) {
        // SAFETY: by the contract of this function.
        unsafe {
            match garbage {
                Garbage::Buffer(raw) => self.memory.free(&self.device, raw),
                Garbage::Frame(frame) => frame.destroy(self),
            }
        }
    }
}

impl Queue {
    fn open_recording(&mut self) -> u64 {
        let number = self.next_recording;
        self.next_recording += 1;
        self.open.push(number);
        number
    }

    fn close_recording(&mut self, number: u64) {
        self.open.retain(|open| *open != number);
    }

    /// Reuses and destroys what is done.
    fn reclaim(&mut self, shared: &Shared) -> Result<()> {
        // What was dropped before the oldest open recording began can't be named by work to come.
        if !self.limbo.is_empty() {
            let oldest = self.open.iter().min().copied().unwrap_or(u64::MAX);
            let last = self.last;
            let ready = self.limbo.extract_if(.., |(number, _)| *number <= oldest);
            self.garbage.extend(ready.map(|(_, garbage)| (last, garbage)));
        }
        if self.in_flight.is_empty() && self.garbage.is_empty() {
            return Ok(());
        }
        let done = shared.completed()?.0;
        while let Some((_, mut frame)) = self.in_flight.pop_front_if(|(ticket, _)| *ticket <= done) {
            // SAFETY: the frame's only submission is done.
            match unsafe { frame.reset(shared) } {
                Ok(()) => self.free.push(frame),
                // SAFETY: as above.
                Err(_) => unsafe { frame.destroy(shared) },
            }
        }
        while let Some((_, garbage)) = self.garbage.pop_front_if(|(ticket, _)| *ticket <= done) {
            // SAFETY: all work submitted while it was in use is done, and no open recording knows it.
            unsafe { shared.destroy(garbage) };
        }
        Ok(())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let queue = std::mem::take(self.queue.get_mut().unwrap_or_else(|poison| poison.into_inner()));
        // After a lost device there is nothing to wait for.
        let (semaphores, values) = ([self.timeline], [queue.last]);
        let info = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        // SAFETY: the semaphore is alive and its value was submitted.
        unsafe { self.device.raw.wait_semaphores(&info, u64::MAX) }.ok();
        let frames = queue.free.into_iter().chain(queue.in_flight.into_iter().map(|(_, frame)| frame));
        let garbage = queue.garbage.into_iter().chain(queue.limbo).map(|(_, garbage)| garbage);
        let readback = self.readback.get_mut().unwrap_or_else(|poison| poison.into_inner()).take();
        let pipelines = std::mem::take(self.pipelines.get_mut().unwrap_or_else(|poison| poison.into_inner()));
        // SAFETY: all our work is done, and no one else holds `self`, so nothing uses these any more.
        unsafe {
            frames.for_each(|frame| frame.destroy(self));
            garbage.chain(readback.map(Garbage::Buffer)).for_each(|garbage| self.destroy(garbage));
            queue.free_arenas.into_iter().for_each(|arena| arena.destroy(self));
            pipelines.into_values().for_each(|pipeline| self.device.raw.destroy_pipeline(pipeline, None));
            self.device.raw.destroy_pipeline_layout(self.layout, None);
            self.device.raw.destroy_semaphore(self.timeline, None);
        }
        // The allocator frees its blocks when `memory` drops, before `device`: fields drop in order.
    }
}

/// A command buffer being recorded; dropped without [`Recording::submit`], it leaves no trace.
pub(super) struct Recording {
    shared: Arc<Shared>,
    number: u64,
    frame: Option<Frame>,
}

impl Recording {
    pub(super) fn frame(&mut self) -> &mut Frame {
        self.frame.as_mut().expect("a recording has its frame until it is submitted or kept")
    }

    fn end(&mut self) -> Result<()> {
        let shared = self.shared.clone();
        self.frame().end(&shared.device)
    }

    /// Ends the command buffer and sends it.
    pub(super) fn submit(mut self) -> Result<Ticket> {
        self.end()?;
        let mut queue = lock(&self.shared.queue);
        let commands = self.frame.as_ref().map(|frame| frame.commands).unwrap_or_default();
        let ticket = self.shared.send(&mut queue, commands)?;
        queue.in_flight.extend(self.frame.take().map(|frame| (ticket.0, frame)));
        Ok(ticket)
    }

    /// Ends the command buffer and hands it out, to be replayed.
    pub(super) fn keep(mut self) -> Result<Frame> {
        self.end()?;
        Ok(self.frame.take().expect("taken only here"))
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let mut queue = lock(&self.shared.queue);
        queue.close_recording(self.number);
        if let Some(mut frame) = self.frame.take() {
            // SAFETY: a frame that is still here was never submitted.
            match unsafe { frame.reset(&self.shared) } {
                Ok(()) => queue.free.push(frame),
                // SAFETY: as above.
                Err(_) => unsafe { frame.destroy(&self.shared) },
            }
        }
    }
}
