//! Reads a pickle as data: the opcodes and the few names that a state dict of tensors is made of.
//!
//! A pickle is a program for a stack machine that can call anything Python can import. This machine can't: a name is
//! looked up in a list of a dozen, "calling" one builds a value of [`Value`], and whatever is not on the list ends the
//! reading. It has no way to open, import or run.

use std::collections::HashMap;
use std::rc::Rc;

use safetensors::Dtype;

use super::super::json::excerpt;
use super::super::reject::{Code, Loaded, Reject};

/// Longest pickle that is read: tens of thousands of tensors take a few MB.
const MAX_PICKLE: usize = 16 << 20;
/// Most values on the stack.
const MAX_STACK: usize = 1 << 16;
/// Deepest nesting of values in values.
const MAX_DEPTH: u8 = 32;

/// The names that a state dict needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Global {
    OrderedDict,
    Size,
    RebuildTensor,
    RebuildParameter,
    Storage(Dtype),
}

impl Global {
    fn of(module: &str, name: &str) -> Option<Self> {
        Some(match (module, name) {
            ("collections", "OrderedDict") => Global::OrderedDict,
            ("torch", "Size") => Global::Size,
            ("torch._utils", "_rebuild_tensor_v2") => Global::RebuildTensor,
            ("torch._utils", "_rebuild_parameter") => Global::RebuildParameter,
            ("torch", storage) => Global::Storage(match storage {
                "FloatStorage" => Dtype::F32,
                "HalfStorage" => Dtype::F16,
                "BFloat16Storage" => Dtype::BF16,
                "DoubleStorage" => Dtype::F64,
                "LongStorage" => Dtype::I64,
                "IntStorage" => Dtype::I32,
                "ShortStorage" => Dtype::I16,
                "CharStorage" => Dtype::I8,
                "ByteStorage" => Dtype::U8,
                "BoolStorage" => Dtype::BOOL,
                _ => return None,
            }),
            _ => return None,
        })
    }
}

/// A storage: an entry of the archive.
#[derive(Debug)]
pub(super) struct Storage {
    pub key: Box<str>,
    pub dtype: Dtype,
    /// Elements, as the pickle says.
    pub elements: usize,
}

/// A tensor as the pickle describes it; nothing is checked against the storage yet.
#[derive(Debug)]
pub(super) struct Tensor {
    pub storage: Rc<Storage>,
    /// Elements before the first.
    pub offset: usize,
    pub shape: Vec<usize>,
    /// Elements from one index to the next, by dimension.
    pub strides: Vec<usize>,
}

/// What the stack holds.
#[derive(Clone, Debug)]
pub(super) enum Value {
    None,
    Bool,
    Int(i64),
    Float,
    Text(Rc<str>),
    /// Its items, and how deep they nest: shared items would make counting it again take for ever.
    Tuple(Rc<[Value]>, u8),
    /// Only as the argument of another value: its items are not kept.
    List,
    /// Index into [`Machine::dicts`].
    Dict(usize),
    Global(Global),
    Storage(Rc<Storage>),
    Tensor(Rc<Tensor>),
}

impl Value {
    /// What it is, for messages.
    fn kind(&self) -> &'static str {
        match self {
            Value::None => "None",
            Value::Bool => "a bool",
            Value::Int(_) => "an int",
            Value::Float => "a float",
            Value::Text(_) => "a string",
            Value::Tuple(..) => "a tuple",
            Value::List => "a list",
            Value::Dict(_) => "a dict",
            Value::Global(_) => "a class or function",
            Value::Storage(_) => "a storage",
            Value::Tensor(_) => "a tensor",
        }
    }

    fn depth(&self) -> u8 {
        match self {
            Value::Tuple(_, depth) => *depth,
            _ => 0,
        }
    }
}

/// Reads a state dict: tensors by name, in the pickle's order. `file` is for messages.
pub(super) fn state_dict(file: &str, pickle: &[u8]) -> Loaded<Vec<(Rc<str>, Rc<Tensor>)>> {
    if pickle.len() > MAX_PICKLE {
        let message = format!("{file}: a pickle of {} bytes, expected at most {MAX_PICKLE}", pickle.len());
        return Err(Reject::new(Code::PickleSize, message));
    }
    let mut machine = Machine {
        file,
        bytes: pickle,
        at: 0,
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
        dicts: Vec::new(),
        // A real one makes a value for every four of its bytes.
        left: 1024 + pickle.len() / 2,
    };
    let root = machine.run()?;
    let Value::Dict(root) = root else {
        return Err(
            machine.fault(Code::PickleValue, &format!("is {}, expected a dict of tensors by name", root.kind()))
        );
    };
    let items = std::mem::take(&mut machine.dicts[root]);
    let mut tensors = Vec::with_capacity(items.len());
    let mut seen = std::collections::HashSet::new();
    for (key, value) in items {
        let Value::Text(name) = key else {
            return Err(
                machine.fault(Code::PickleValue, &format!("has {} as a key, expected a tensor's name", key.kind()))
            );
        };
        let Value::Tensor(tensor) = value else {
            let what = format!("has {} under {:?}, expected a tensor", value.kind(), excerpt(&name));
            return Err(machine.fault(Code::PickleValue, &what));
        };
        if !seen.insert(name.clone()) {
            return Err(machine.fault(Code::FileDuplicate, &format!("has tensor {:?} twice", excerpt(&name))));
        }
        tensors.push((name, tensor));
    }
    Ok(tensors)
}

struct Machine<'p> {
    file: &'p str,
    bytes: &'p [u8],
    at: usize,
    stack: Vec<Value>,
    marks: Vec<usize>,
    memo: HashMap<u32, Value>,
    dicts: Vec<Vec<(Value, Value)>>,
    /// Values that may still be made.
    left: usize,
}

impl Machine<'_> {
    fn fault(&self, code: Code, what: &str) -> Box<Reject> {
        Reject::new(code, format!("{}: data.pkl {what} (before byte {})", self.file, self.at))
    }

    fn broken(&self, what: &str) -> Box<Reject> {
        self.fault(Code::PickleOpcode, what)
    }

    fn take(&mut self, count: usize) -> Loaded<&[u8]> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.bytes.len());
        let Some(end) = end else { return Err(self.broken("ends within an opcode")) };
        let bytes = &self.bytes[self.at..end];
        self.at = end;
        Ok(bytes)
    }

    fn number(&mut self, bytes: usize) -> Loaded<usize> {
        Ok(self.take(bytes)?.iter().rev().fold(0, |n, byte| n << 8 | usize::from(*byte)))
    }

    fn line(&mut self) -> Loaded<String> {
        let rest = &self.bytes[self.at..];
        // No real module or class has a longer name.
        let Some(len) = rest.iter().take(256).position(|byte| *byte == b'\n') else {
            return Err(self.broken("has a name without an end"));
        };
        self.at += len + 1;
        Ok(String::from_utf8_lossy(&rest[..len]).into_owned())
    }

    fn text(&mut self, len: usize) -> Loaded<Value> {
        let text = std::str::from_utf8(self.take(len)?).map(Rc::from);
        text.map(Value::Text).map_err(|_| self.broken("has a string that is not UTF-8"))
    }

    fn spend(&mut self) -> Loaded<()> {
        match self.left.checked_sub(1) {
            Some(left) => self.left = left,
            None => return Err(self.fault(Code::PickleSize, "makes more values than a state dict of its length")),
        }
        Ok(())
    }

    fn push(&mut self, value: Value) -> Loaded<()> {
        self.spend()?;
        if self.stack.len() >= MAX_STACK {
            return Err(self.fault(Code::PickleSize, &format!("puts more than {MAX_STACK} values on the stack")));
        }
        self.stack.push(value);
        Ok(())
    }

    /// The top of the stack, not reaching below the last mark.
    fn pop(&mut self) -> Loaded<Value> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len() > floor {
            true => self.stack.pop().ok_or_else(|| self.broken("takes a value from an empty stack")),
            false => Err(self.broken("takes a value from an empty stack")),
        }
    }

    fn pop_to_mark(&mut self) -> Loaded<Vec<Value>> {
        match self.marks.pop() {
            Some(mark) => Ok(self.stack.split_off(mark)),
            None => Err(self.broken("looks for a mark that is not there")),
        }
    }

    fn tuple(&mut self, items: Vec<Value>) -> Loaded<()> {
        let depth = 1 + items.iter().map(Value::depth).max().unwrap_or(0);
        if depth > MAX_DEPTH {
            return Err(self.fault(Code::PickleSize, &format!("nests tuples more than {MAX_DEPTH} deep")));
        }
        self.push(Value::Tuple(items.into(), depth))
    }

    fn new_dict(&mut self) -> Loaded<Value> {
        self.spend()?;
        self.dicts.push(Vec::new());
        Ok(Value::Dict(self.dicts.len() - 1))
    }

    fn set(&mut self, items: Vec<Value>) -> Loaded<()> {
        let Some(Value::Dict(dict)) = self.stack.last().cloned() else {
            return Err(self.broken("sets items of what is no dict"));
        };
        let (pairs, rest) = items.as_chunks::<2>();
        if !rest.is_empty() {
            return Err(self.broken("sets a key without a value"));
        }
        self.dicts[dict].extend(pairs.iter().map(|[key, value]| (key.clone(), value.clone())));
        Ok(())
    }

    fn remember(&mut self, index: usize) -> Loaded<()> {
        self.spend()?;
        let Some(top) = self.stack.last().cloned() else {
            return Err(self.broken("remembers the top of an empty stack"));
        };
        self.memo.insert(index as u32, top);
        // A real one remembers something for every fifteen of its bytes.
        if self.memo.len() > 1024 + self.bytes.len() / 6 {
            return Err(self.fault(Code::PickleSize, "remembers more values than a state dict of its length"));
        }
        Ok(())
    }

    fn recall(&mut self, index: usize) -> Loaded<()> {
        match self.memo.get(&(index as u32)).cloned() {
            Some(value) => self.push(value),
            None => Err(self.broken("recalls what was not remembered")),
        }
    }

    fn run(&mut self) -> Loaded<Value> {
        loop {
            let opcode = self.take(1)?[0];
            match opcode {
                // PROTO, FRAME
                0x80 => match self.number(1)? {
                    2..=5 => {}
                    other => return Err(self.broken(&format!("is of protocol {other}, expected 2 to 5"))),
                },
                0x95 => _ = self.take(8)?,
                b'.' => {
                    let top = self.pop()?;
                    return match self.stack.is_empty() && self.marks.is_empty() {
                        true => Ok(top),
                        false => Err(self.broken("ends with values left over")),
                    };
                }
                b'(' => {
                    self.spend()?;
                    self.marks.push(self.stack.len());
                }
                b'N' => self.push(Value::None)?,
                0x88 | 0x89 => self.push(Value::Bool)?,
                b'K' => self.int(1)?,
                b'M' => self.int(2)?,
                b'J' => {
                    let n = self.number(4)? as u32;
                    self.push(Value::Int(n.cast_signed().into()))?;
                }
                // LONG1: the bytes of a long, little-endian
                0x8a => {
                    let len = self.number(1)?;
                    if len > 8 {
                        return Err(self.broken("has an integer of more than 64 bits"));
                    }
                    let bytes = self.take(len)?;
                    let sign = if bytes.last().is_some_and(|b| *b >= 0x80) { 0xff } else { 0 };
                    let mut wide = [sign; 8];
                    wide[..len].copy_from_slice(bytes);
                    self.push(Value::Int(i64::from_le_bytes(wide)))?;
                }
                b'G' => {
                    self.take(8)?;
                    self.push(Value::Float)?;
                }
                // BINUNICODE, SHORT_BINUNICODE
                b'X' | 0x8c => {
                    let len = self.number(if opcode == b'X' { 4 } else { 1 })?;
                    let text = self.text(len)?;
                    self.push(text)?;
                }
                b')' => self.tuple(Vec::new())?,
                0x85..=0x87 => {
                    let mut items = Vec::with_capacity(3);
                    for _ in 0..opcode - 0x84 {
                        items.push(self.pop()?);
                    }
                    items.reverse();
                    self.tuple(items)?;
                }
                b't' => {
                    let items = self.pop_to_mark()?;
                    self.tuple(items)?;
                }
                b'}' => {
                    let dict = self.new_dict()?;
                    self.push(dict)?;
                }
                b']' => self.push(Value::List)?,
                // APPEND, APPENDS
                b'a' | b'e' => {
                    if opcode == b'a' {
                        self.pop()?;
                    } else {
                        self.pop_to_mark()?;
                    }
                    if !matches!(self.stack.last(), Some(Value::List)) {
                        return Err(self.broken("appends to what is no list"));
                    }
                }
                b's' => {
                    let value = self.pop()?;
                    let key = self.pop()?;
                    self.set(vec![key, value])?;
                }
                b'u' => {
                    let items = self.pop_to_mark()?;
                    self.set(items)?;
                }
                // BINPUT, LONG_BINPUT, MEMOIZE, BINGET, LONG_BINGET
                b'q' => {
                    let index = self.number(1)?;
                    self.remember(index)?;
                }
                b'r' => {
                    let index = self.number(4)?;
                    self.remember(index)?;
                }
                0x94 => self.remember(self.memo.len())?,
                b'h' => {
                    let index = self.number(1)?;
                    self.recall(index)?;
                }
                b'j' => {
                    let index = self.number(4)?;
                    self.recall(index)?;
                }
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    self.global(&module, &name)?;
                }
                0x93 => match (self.pop()?, self.pop()?) {
                    (Value::Text(name), Value::Text(module)) => self.global(&module, &name)?,
                    _ => return Err(self.broken("names a class by what is no string")),
                },
                b'Q' => {
                    let id = self.pop()?;
                    let storage = self.storage(&id)?;
                    self.push(storage)?;
                }
                b'R' => {
                    let (arguments, callee) = (self.pop()?, self.pop()?);
                    let value = self.reduce(&callee, &arguments)?;
                    self.push(value)?;
                }
                // BUILD: a state dict of a module has _metadata, versions of its modules.
                b'b' => {
                    self.pop()?;
                    if !matches!(self.stack.last(), Some(Value::Dict(_))) {
                        return Err(self.broken("gives attributes to what is no dict"));
                    }
                }
                other => {
                    let shown =
                        if other.is_ascii_graphic() { format!("{:?}", other as char) } else { format!("{other:#04x}") };
                    return Err(self.broken(&format!("has opcode {shown}, which no state dict needs")));
                }
            }
        }
    }

    fn int(&mut self, bytes: usize) -> Loaded<()> {
        let n = self.number(bytes)?;
        self.push(Value::Int(n as i64))
    }

    fn global(&mut self, module: &str, name: &str) -> Loaded<()> {
        match Global::of(module, name) {
            Some(global) => self.push(Value::Global(global)),
            None => Err(self.fault(
                Code::PickleGlobal,
                &format!(
                    "names {}.{}, which no state dict of tensors needs; it was not run",
                    excerpt(module),
                    excerpt(name)
                ),
            )),
        }
    }

    /// `("storage", torch.FloatStorage, key, location, elements)`
    fn storage(&mut self, id: &Value) -> Loaded<Value> {
        if let Value::Tuple(items, _) = id
            && let [Value::Text(kind), Value::Global(Global::Storage(dtype)), Value::Text(key), _, Value::Int(elements)] =
                &**items
            && &**kind == "storage"
            && let Ok(elements) = usize::try_from(*elements)
        {
            return Ok(Value::Storage(Rc::new(Storage { key: (&**key).into(), dtype: *dtype, elements })));
        }
        Err(self.fault(Code::PickleValue, "refers to what is no storage of a known element type"))
    }

    fn reduce(&mut self, callee: &Value, arguments: &Value) -> Loaded<Value> {
        let Value::Tuple(items, _) = arguments else {
            return Err(self.broken("builds a value from what is no tuple"));
        };
        let Value::Global(global) = callee else {
            return Err(self.broken(&format!("calls {}", callee.kind())));
        };
        match (global, &**items) {
            (Global::OrderedDict, []) => return self.new_dict(),
            (Global::Size, [size @ Value::Tuple(..)]) => return Ok(size.clone()),
            (Global::RebuildParameter, [tensor @ Value::Tensor(_), ..]) => return Ok(tensor.clone()),
            (
                Global::RebuildTensor,
                [Value::Storage(storage), Value::Int(offset), Value::Tuple(shape, _), Value::Tuple(strides, _), ..],
            ) => {
                let sizes = |items: &[Value]| -> Option<Vec<usize>> {
                    let size = |item: &Value| match item {
                        Value::Int(n) => usize::try_from(*n).ok(),
                        _ => None,
                    };
                    (items.len() <= 8).then(|| items.iter().map(size).collect())?
                };
                if let (Ok(offset), Some(shape), Some(strides)) =
                    (usize::try_from(*offset), sizes(shape), sizes(strides))
                    && shape.len() == strides.len()
                {
                    return Ok(Value::Tensor(Rc::new(Tensor { storage: storage.clone(), offset, shape, strides })));
                }
                let what = "has a tensor without a shape of at most 8 dimensions and as many strides";
                return Err(self.fault(Code::PickleTensor, what));
            }
            _ => {}
        }
        Err(self.fault(Code::PickleValue, &format!("builds {global:?} from other parts than torch.save writes")))
    }
}
