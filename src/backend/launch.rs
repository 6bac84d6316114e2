//! A checked launch: the one place where "this kernel may run on this memory" is decided.

use std::any::Any;
use std::fmt::{self, Debug};
use std::sync::Arc;

use crate::contract::{self, Kernel, Params, Spec};
use crate::error::Result;
use crate::memory::Region;

/// A compiled kernel of one device. Cheap to clone.
#[derive(Clone)]
pub struct Pipeline {
    kernel: Kernel,
    spec: Spec,
    inner: Arc<dyn Any + Send + Sync>,
}

impl Pipeline {
    /// For backends: `inner` is what the backend's encoder needs to launch it.
    pub fn new(kernel: Kernel, spec: Spec, inner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { kernel, spec, inner }
    }

    /// Which kernel it is.
    pub fn kernel(&self) -> Kernel {
        self.kernel
    }

    /// What it is specialised on.
    pub fn spec(&self) -> Spec {
        self.spec
    }

    /// The backend's own part, if it is of type `T`.
    pub fn inner<T: Any>(&self) -> Option<&T> {
        self.inner.downcast_ref()
    }
}

impl Debug for Pipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]", self.kernel.name(), self.spec)
    }
}

/// A kernel, its operands and its parameters, checked against each other.
#[derive(Clone, Debug)]
pub struct Launch<'a> {
    pipeline: &'a Pipeline,
    operands: &'a [Region],
    params: Params,
}

impl<'a> Launch<'a> {
    /// Checks that a kernel which keeps to the contract stays inside `operands`, in the order of
    /// [`Kernel::operands`]; trailing ones without a use are left out. The weights' address and length in `params`
    /// are filled in from the operand, where the kernel has one.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) names the operand that is missing, too small, or overlaps another.
    pub fn new(pipeline: &'a Pipeline, operands: &'a [Region], mut params: Params) -> Result<Self> {
        contract::check(pipeline.kernel, pipeline.spec, operands, &params)?;
        let list = pipeline.kernel.operands().iter();
        if let Some((_, weights)) = list.zip(operands).find(|(operand, _)| operand.name == "weights") {
            let (address, len) = (weights.ptr().0, weights.len());
            (params.weights_lo, params.weights_hi) = (address as u32, (address >> 32) as u32);
            (params.weights_len_lo, params.weights_len_hi) = (len as u32, (len >> 32) as u32);
        }
        Ok(Self { pipeline, operands, params })
    }

    /// The kernel.
    pub fn pipeline(&self) -> &'a Pipeline {
        self.pipeline
    }

    /// The operands, in the contract's order.
    pub fn operands(&self) -> &'a [Region] {
        self.operands
    }

    /// The parameters, with the weights' address filled in.
    pub fn params(&self) -> &Params {
        &self.params
    }

    /// Workgroups in x, y and z on a device of `max_groups`; an x of 0 means nothing to do.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit) when they are too many even folded.
    pub fn groups(&self, max_groups: [u32; 2]) -> Result<[u32; 3]> {
        let (groups, sites) = self.pipeline.kernel.groups(&self.params);
        let [x, y] = contract::fold(groups, max_groups[0], max_groups[1])?;
        Ok([x, y, sites])
    }
}
