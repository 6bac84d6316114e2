//! Files as `torch.save` writes them since torch 1.6, by hand: a zip of stored entries around a pickle.

/// A zip of stored entries, with any names.
pub fn zip(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for (name, data) in entries {
        let at = out.len() as u32;
        let sizes = [crc32(data), data.len() as u32, data.len() as u32].map(u32::to_le_bytes).concat();
        let lengths = [(name.len() as u16).to_le_bytes(), [0; 2]].concat();
        // Version 2.0, no flags, stored, no date.
        let common = [&[20, 0, 0, 0, 0, 0, 0, 0, 0x21, 0][..], &sizes, &lengths].concat();
        out.extend_from_slice(b"PK\x03\x04");
        out.extend_from_slice(&common);
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(data);
        directory.extend_from_slice(b"PK\x01\x02\x14\x00");
        directory.extend_from_slice(&common);
        directory.extend_from_slice(&[0; 10]);
        directory.extend_from_slice(&at.to_le_bytes());
        directory.extend_from_slice(name.as_bytes());
    }
    let (count, at, len) = (entries.len() as u16, out.len() as u32, directory.len() as u32);
    out.extend_from_slice(&directory);
    out.extend_from_slice(b"PK\x05\x06\0\0\0\0");
    out.extend_from_slice(&[count.to_le_bytes(), count.to_le_bytes()].concat());
    out.extend_from_slice(&[len.to_le_bytes(), at.to_le_bytes()].concat());
    out.extend_from_slice(&[0, 0]);
    out
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
    })
}

/// Appends opcodes.
#[derive(Clone, Default)]
pub struct Pickle(pub Vec<u8>);

impl Pickle {
    pub fn op(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub fn global(self, module: &str, name: &str) -> Self {
        self.op(format!("c{module}\n{name}\n").as_bytes())
    }

    pub fn text(self, text: &str) -> Self {
        self.op(b"X").op(&(text.len() as u32).to_le_bytes()).op(text.as_bytes())
    }

    pub fn int(self, n: u32) -> Self {
        self.op(b"J").op(&n.to_le_bytes())
    }

    pub fn ints(self, ns: &[u32]) -> Self {
        ns.iter().fold(self.op(b"("), |p, n| p.int(*n)).op(b"t")
    }

    /// A tensor in storage `key`.
    pub fn tensor(self, kind: &str, key: &str, elements: u32, offset: u32, shape: &[u32], strides: &[u32]) -> Self {
        self.global("torch._utils", "_rebuild_tensor_v2")
            .op(b"((")
            .text("storage")
            .global("torch", kind)
            .text(key)
            .text("cpu")
            .int(elements)
            .op(b"tQ")
            .int(offset)
            .ints(shape)
            .ints(strides)
            .op(b"\x89")
            .global("collections", "OrderedDict")
            .op(b")RtR")
    }
}

/// A dict of what `items` puts on the stack: keys and values in turn.
pub fn dict(items: Pickle) -> Vec<u8> {
    Pickle::default().op(b"\x80\x02}(").op(&items.0).op(b"u.").0
}

/// A file with this pickle and these storages.
pub fn file(pickle: &[u8], storages: &[(&str, &[u8])]) -> Vec<u8> {
    let names: Vec<_> = storages.iter().map(|(key, _)| format!("adapter_model/data/{key}")).collect();
    let mut entries = vec![("adapter_model/data.pkl", pickle), ("adapter_model/byteorder", b"little".as_slice())];
    entries.extend(names.iter().zip(storages).map(|(name, (_, data))| (name.as_str(), *data)));
    entries.push(("adapter_model/version", b"3\n"));
    zip(&entries)
}
