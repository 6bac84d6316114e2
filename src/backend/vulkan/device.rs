//! Instances and devices: which drivers are there, which of their devices will do, and opening one.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ash::vk;

use super::{NAME, driver};
use crate::backend::{Caps, DeviceClass, WeightLayout};
use crate::error::{Error, Result};

const VALIDATION_LAYER: &CStr = c"VK_LAYER_KHRONOS_validation";
/// Set to `1`, it turns the validation layer on.
pub(super) const VALIDATION_ENV: &str = "LORAPOOL_VULKAN_VALIDATION";

/// Warnings and errors of the validation layer so far, in this process.
static VALIDATION_MESSAGES: AtomicU64 = AtomicU64::new(0);

/// Warnings and errors that the validation layer has reported in this process. It is on while
/// `LORAPOOL_VULKAN_VALIDATION=1`; each message is also logged as an error.
pub fn validation_messages() -> u64 {
    VALIDATION_MESSAGES.load(Ordering::Relaxed)
}

/// Whether [`validation_messages`] can count: the validation layer is installed.
pub fn validation_installed() -> bool {
    // SAFETY: loading the system's Vulkan loader runs its initialisers, which is what it is made for.
    unsafe { ash::Entry::load() }.is_ok_and(|entry| has_layer(&entry))
}

fn has_layer(entry: &ash::Entry) -> bool {
    // SAFETY: a global command; `entry` holds the loaded library.
    let layers = unsafe { entry.enumerate_instance_layer_properties() }.unwrap_or_default();
    layers.iter().any(|layer| layer.layer_name_as_c_str() == Ok(VALIDATION_LAYER))
}

fn unavailable(reason: impl Into<String>) -> Error {
    Error::Unavailable { backend: NAME, reason: reason.into() }
}

/// An instance: our own, destroyed with the last device made from it, or the host's, left alone.
pub(super) struct Instance {
    pub(super) raw: ash::Instance,
    /// The API version that the instance was made for.
    version: u32,
    own: Option<Own>,
}

struct Own {
    messenger: Option<(ash::ext::debug_utils::Instance, vk::DebugUtilsMessengerEXT)>,
    /// VK_EXT_debug_utils is on: objects can be named.
    names: bool,
    /// Keeps the loader library mapped.
    _entry: ash::Entry,
}

impl Drop for Instance {
    fn drop(&mut self) {
        if let Some(own) = &self.own {
            // SAFETY: we made both, and whatever was made from them is gone: devices hold an `Arc` of this.
            unsafe {
                if let Some((debug, messenger)) = &own.messenger {
                    debug.destroy_debug_utils_messenger(*messenger, None);
                }
                self.raw.destroy_instance(None);
            }
        }
    }
}

impl Instance {
    /// Loads the system's Vulkan loader and makes an instance.
    pub(super) fn new() -> Result<Arc<Self>> {
        // SAFETY: loading the system's Vulkan loader runs its initialisers, which is what it is made for.
        let entry = unsafe { ash::Entry::load() }
            .map_err(|error| unavailable(format!("the Vulkan loader could not be loaded: {error}")))?;
        // SAFETY: a global command; `entry` holds the loaded library.
        let loader = unsafe { entry.try_enumerate_instance_version() }
            .map_err(driver("vkEnumerateInstanceVersion"))?
            .unwrap_or(vk::API_VERSION_1_0);
        if loader < vk::API_VERSION_1_2 {
            return Err(unavailable(format!("the Vulkan loader is of version {}, 1.2 is needed", version(loader))));
        }
        let api = loader.min(vk::API_VERSION_1_3);

        // SAFETY: a global command; `entry` holds the loaded library.
        let present = unsafe { entry.enumerate_instance_extension_properties(None) }
            .map_err(driver("vkEnumerateInstanceExtensionProperties"))?;
        let has = |name: &CStr| present.iter().any(|e| e.extension_name_as_c_str() == Ok(name));
        let mut layers = Vec::new();
        let mut extensions = Vec::new();
        let validate = std::env::var(VALIDATION_ENV).is_ok_and(|v| v == "1");
        if validate {
            if !has_layer(&entry) {
                let layer = VALIDATION_LAYER.to_string_lossy();
                return Err(unavailable(format!("{VALIDATION_ENV}=1, but the layer {layer} is not installed")));
            }
            layers.push(VALIDATION_LAYER.as_ptr());
        }
        // The layer brings the extension with it.
        let names = validate || has(ash::ext::debug_utils::NAME);
        if names {
            extensions.push(ash::ext::debug_utils::NAME.as_ptr());
        }
        let mut flags = vk::InstanceCreateFlags::empty();
        // Without this the loader hides drivers layered on other APIs (MoltenVK).
        if has(ash::khr::portability_enumeration::NAME) {
            extensions.push(ash::khr::portability_enumeration::NAME.as_ptr());
            flags |= vk::InstanceCreateFlags::ENUMERATE_PORTABILITY_KHR;
        }

        let application = vk::ApplicationInfo::default().application_name(c"lorapool").api_version(api);
        let mut for_creation = messenger_info();
        let mut info = vk::InstanceCreateInfo::default()
            .application_info(&application)
            .flags(flags)
            .enabled_layer_names(&layers)
            .enabled_extension_names(&extensions);
        if validate {
            info = info.push_next(&mut for_creation);
        }
        // SAFETY: `info` and all it points at live until the call returns; layers and extensions are present.
        let raw = unsafe { entry.create_instance(&info, None) }.map_err(|error| match error {
            vk::Result::ERROR_INCOMPATIBLE_DRIVER => {
                unavailable("no Vulkan driver is installed (vkCreateInstance: ERROR_INCOMPATIBLE_DRIVER)")
            }
            error => unavailable(format!("vkCreateInstance: {error}")),
        })?;
        let messenger = validate.then(|| {
            let debug = ash::ext::debug_utils::Instance::new(&entry, &raw);
            // SAFETY: the extension is enabled on `raw`; the callback is a plain function.
            let messenger = unsafe { debug.create_debug_utils_messenger(&messenger_info(), None) };
            messenger.map(|m| (debug, m)).map_err(driver("vkCreateDebugUtilsMessengerEXT"))
        });
        let messenger = match messenger.transpose() {
            Ok(messenger) => messenger,
            Err(error) => {
                // SAFETY: nothing was made from it.
                unsafe { raw.destroy_instance(None) };
                return Err(error);
            }
        };
        Ok(Arc::new(Self { raw, version: api, own: Some(Own { messenger, names, _entry: entry }) }))
    }

    /// The host's instance, made for API `version`; it stays the host's to destroy.
    pub(super) fn of_host(raw: ash::Instance, version: u32) -> Arc<Self> {
        Arc::new(Self { raw, version, own: None })
    }

    /// Devices that will do, GPUs before drivers that compute on the CPU, and for the others why not.
    pub(super) fn candidates(self: &Arc<Self>) -> Result<(Vec<Candidate>, Vec<String>)> {
        // SAFETY: `self.raw` is a live instance.
        let devices = match unsafe { self.raw.enumerate_physical_devices() } {
            Ok(devices) => devices,
            // Some loaders report the absence of a driver here.
            Err(vk::Result::ERROR_INITIALIZATION_FAILED) => Vec::new(),
            Err(error) => return Err(driver("vkEnumeratePhysicalDevices")(error)),
        };
        let (mut good, mut refused) = (Vec::new(), Vec::new());
        for physical in devices {
            // SAFETY: `physical` was enumerated from `self.raw`.
            match unsafe { Candidate::examine(self, physical) } {
                Ok(candidate) => good.push(candidate),
                Err(reason) => {
                    tracing::info!(%reason, "Vulkan device left out");
                    refused.push(reason);
                }
            }
        }
        // A workstation may list its software driver first.
        good.sort_by_key(|candidate| match candidate.caps.class {
            DeviceClass::Discrete => 0,
            DeviceClass::Integrated => 1,
            DeviceClass::Other => 2,
            DeviceClass::Cpu | DeviceClass::Software => 3,
        });
        Ok((good, refused))
    }
}

fn messenger_info() -> vk::DebugUtilsMessengerCreateInfoEXT<'static> {
    use vk::{DebugUtilsMessageSeverityFlagsEXT as Severity, DebugUtilsMessageTypeFlagsEXT as Type};
    // The loader's own remarks come as GENERAL: not about our calls.
    vk::DebugUtilsMessengerCreateInfoEXT::default()
        .message_severity(Severity::WARNING | Severity::ERROR)
        .message_type(Type::VALIDATION | Type::PERFORMANCE)
        .pfn_user_callback(Some(on_message))
}

unsafe extern "system" fn on_message(
    _severity: vk::DebugUtilsMessageSeverityFlagsEXT,
    _types: vk::DebugUtilsMessageTypeFlagsEXT,
    data: *const vk::DebugUtilsMessengerCallbackDataEXT<'_>,
    _user: *mut c_void,
) -> vk::Bool32 {
    VALIDATION_MESSAGES.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the layer passes a valid record, whose message is a C string or null, for the time of the call.
    let message = unsafe { data.as_ref().and_then(|d| (!d.p_message.is_null()).then(|| CStr::from_ptr(d.p_message))) };
    tracing::error!(message = %message.unwrap_or_default().to_string_lossy(), "Vulkan validation");
    vk::FALSE
}

/// `1.3.230`.
fn version(version: u32) -> String {
    let part = (vk::api_version_major(version), vk::api_version_minor(version), vk::api_version_patch(version));
    format!("{}.{}.{}", part.0, part.1, part.2)
}

/// A device that has what the kernels need.
pub(super) struct Candidate {
    pub(super) caps: Caps,
    instance: Arc<Instance>,
    physical: vk::PhysicalDevice,
    queue_family: u32,
}

impl Candidate {
    /// # Safety
    /// - `physical` belongs to `instance`.
    pub(super) unsafe fn examine(instance: &Arc<Instance>, physical: vk::PhysicalDevice) -> Result<Self, String> {
        let raw = &instance.raw;
        // SAFETY: by the contract of this function. The same holds for the other queries below.
        let properties = unsafe { raw.get_physical_device_properties(physical) };
        let name = properties.device_name_as_c_str().unwrap_or(c"unnamed device").to_string_lossy().into_owned();
        let api = properties.api_version.min(instance.version | 0xfff);
        if api < vk::API_VERSION_1_2 {
            return Err(format!("{name} has Vulkan {}, 1.2 is needed", version(properties.api_version)));
        }

        let mut features12 = vk::PhysicalDeviceVulkan12Features::default();
        let mut features = vk::PhysicalDeviceFeatures2::default().push_next(&mut features12);
        // SAFETY: as above; the device knows the structure, which is of Vulkan 1.2.
        unsafe { raw.get_physical_device_features2(physical, &mut features) };
        let needed = [
            ("bufferDeviceAddress", features12.buffer_device_address),
            ("timelineSemaphore", features12.timeline_semaphore),
        ];
        if let Some((feature, _)) = needed.iter().find(|(_, present)| *present == vk::FALSE) {
            return Err(format!("{name} lacks the feature {feature}"));
        }

        // SAFETY: as above.
        let families = unsafe { raw.get_physical_device_queue_family_properties(physical) };
        let queue_family = families
            .iter()
            .position(|f| f.queue_count > 0 && f.queue_flags.contains(vk::QueueFlags::COMPUTE))
            .ok_or_else(|| format!("{name} lacks a compute queue"))? as u32;

        let mut of_driver = vk::PhysicalDeviceDriverProperties::default();
        let mut subgroups = vk::PhysicalDeviceSubgroupProperties::default();
        let mut maintenance3 = vk::PhysicalDeviceMaintenance3Properties::default();
        let mut of_13 = vk::PhysicalDeviceVulkan13Properties::default();
        let has_13 = api >= vk::API_VERSION_1_3;
        let mut chain = vk::PhysicalDeviceProperties2::default()
            .push_next(&mut of_driver)
            .push_next(&mut subgroups)
            .push_next(&mut maintenance3);
        if has_13 {
            chain = chain.push_next(&mut of_13);
        }
        // SAFETY: as above; all structures are of the device's API version.
        unsafe { raw.get_physical_device_properties2(physical, &mut chain) };
        // SAFETY: as above.
        let memory = unsafe { raw.get_physical_device_memory_properties(physical) };
        let heaps = memory.memory_heaps_as_slice();
        let local = heaps.iter().filter(|h| h.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL)).map(|h| h.size).max();
        let mut max_alloc = maintenance3.max_memory_allocation_size;
        let mut subgroup = [subgroups.subgroup_size; 2];
        if has_13 {
            max_alloc = max_alloc.min(of_13.max_buffer_size);
            subgroup = [of_13.min_subgroup_size, of_13.max_subgroup_size];
        }
        // Lengths are rounded up to 16 bytes on allocation.
        max_alloc &= !15;

        let text = |s: Result<&CStr, _>| s.unwrap_or_default().to_string_lossy().into_owned();
        let driver_name = text(of_driver.driver_name_as_c_str());
        let driver_info = text(of_driver.driver_info_as_c_str());
        let limits = &properties.limits;
        let caps = Caps {
            backend: NAME,
            device: name,
            driver: format!("{driver_name} {driver_info}").trim().to_owned(),
            api: format!("Vulkan {}", version(properties.api_version)),
            class: match properties.device_type {
                vk::PhysicalDeviceType::DISCRETE_GPU => DeviceClass::Discrete,
                vk::PhysicalDeviceType::INTEGRATED_GPU => DeviceClass::Integrated,
                vk::PhysicalDeviceType::CPU => DeviceClass::Software,
                _ => DeviceClass::Other,
            },
            memory: local.unwrap_or(0),
            layout: WeightLayout::SlotMajor,
            max_alloc,
            max_binding: u64::MAX,
            z_parts: 0,
            binding_align: 1,
            max_groups: [limits.max_compute_work_group_count[0], limits.max_compute_work_group_count[1]],
            subgroup,
        };
        Ok(Self { caps, instance: instance.clone(), physical, queue_family })
    }

    /// Makes a device with one queue.
    pub(super) fn open(self) -> Result<(Device, Caps)> {
        let raw = &self.instance.raw;
        // SAFETY: `physical` belongs to the instance, which `self` holds.
        let present = unsafe { raw.enumerate_device_extension_properties(self.physical) }
            .map_err(driver("vkEnumerateDeviceExtensionProperties"))?;
        let mut extensions = Vec::new();
        // The specification demands that it is enabled where it is offered.
        if present.iter().any(|e| e.extension_name_as_c_str() == Ok(ash::khr::portability_subset::NAME)) {
            extensions.push(ash::khr::portability_subset::NAME.as_ptr());
        }
        let queues =
            [vk::DeviceQueueCreateInfo::default().queue_family_index(self.queue_family).queue_priorities(&[1.0])];
        let mut features =
            vk::PhysicalDeviceVulkan12Features::default().buffer_device_address(true).timeline_semaphore(true);
        let info = vk::DeviceCreateInfo::default()
            .queue_create_infos(&queues)
            .enabled_extension_names(&extensions)
            .push_next(&mut features);
        // SAFETY: `info` and all it points at live until the call returns; features and extensions are present.
        let device = unsafe { raw.create_device(self.physical, &info, None) }
            .map_err(|error| driver("vkCreateDevice")(error))?;
        // SAFETY: the device was made with one queue of this family.
        let queue = unsafe { device.get_device_queue(self.queue_family, 0) };
        let own = self.instance.own.as_ref();
        let names = own.filter(|own| own.names).map(|_| ash::ext::debug_utils::Device::new(raw, &device));
        let device = Device {
            raw: device,
            names,
            physical: self.physical,
            queue,
            queue_family: self.queue_family,
            owned: true,
            instance: self.instance,
        };
        Ok((device, self.caps))
    }
}

/// A device and its queue: our own, destroyed here, or the host's, left alone.
pub(super) struct Device {
    pub(super) raw: ash::Device,
    /// To name objects for debuggers and validation messages, where that can be done.
    pub(super) names: Option<ash::ext::debug_utils::Device>,
    pub(super) physical: vk::PhysicalDevice,
    pub(super) queue: vk::Queue,
    pub(super) queue_family: u32,
    pub(super) owned: bool,
    pub(super) instance: Arc<Instance>,
}

impl Device {
    /// Names a buffer, for debuggers and validation messages.
    pub(super) fn name(&self, buffer: vk::Buffer, label: &str) {
        if let (Some(names), Ok(label)) = (&self.names, CString::new(label)) {
            let info = vk::DebugUtilsObjectNameInfoEXT::default().object_handle(buffer).object_name(&label);
            // SAFETY: the extension is enabled on the instance; the buffer was made on this device, by the caller,
            // who alone knows it yet. A name that can't be set is no loss.
            unsafe { names.set_debug_utils_object_name(&info) }.ok();
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: we made it; its one holder destroys all that was made from it before dropping it.
            unsafe { self.raw.destroy_device(None) };
        }
    }
}
