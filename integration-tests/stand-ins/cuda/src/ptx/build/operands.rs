//! The mapping of operands to slots.

use super::{Address, Builder, Built, Named};
use crate::exec::program::{PredSlot, Slot, Special};
use crate::ptx::syntax::Operand;
use crate::ptx::types::{Space, mask_of};

impl Builder<'_> {
    pub(crate) fn new_slot(&mut self, bits: u32) -> Slot {
        self.widths.push(bits);
        self.widths.len() - 1
    }

    pub(crate) fn new_pred(&mut self) -> PredSlot {
        self.preds += 1;
        self.preds - 1
    }

    pub(crate) fn true_pred(&self) -> PredSlot {
        self.true_pred
    }

    /// The mask of a slot's width.
    pub(crate) fn width_mask(&self, slot: Slot) -> u64 {
        mask_of(self.widths[slot])
    }

    /// A slot with this value in all lanes.
    pub(crate) fn constant(&mut self, value: u64) -> Slot {
        if let Some(&slot) = self.constants.get(&value) {
            return slot;
        }
        let slot = self.new_slot(64);
        self.constants.insert(value, slot);
        slot
    }

    fn special(&mut self, name: &str) -> Option<Slot> {
        let axis = |letter: &str| ["x", "y", "z"].iter().position(|&l| l == letter);
        let special = match name.split_once('.') {
            Some(("%tid", letter)) => Special::ThreadId(axis(letter)?),
            Some(("%ntid", letter)) => Special::BlockDim(axis(letter)?),
            Some(("%ctaid", letter)) => Special::BlockId(axis(letter)?),
            Some(("%nctaid", letter)) => Special::GridDim(axis(letter)?),
            Some(_) => return None,
            None => match name {
                "%laneid" => Special::Lane,
                "%warpid" => Special::Warp,
                "WARP_SZ" => return Some(self.constant(32)),
                _ => return None,
            },
        };

        if let Some(&slot) = self.specials.get(&special) {
            return Some(slot);
        }
        let slot = self.new_slot(32);
        self.specials.insert(special, slot);
        Some(slot)
    }

    /// The slot of a value: a register, a constant, a special register or an address.
    pub(crate) fn source(&mut self, operand: &Operand) -> Built<Slot> {
        match operand {
            Operand::Integer(value) | Operand::F64(value) => Ok(self.constant(*value)),
            Operand::F32(bits) => Ok(self.constant(u64::from(*bits))),
            Operand::Name(name) => self.value_of(name, 0),
            Operand::Sum(name, offset) => self.value_of(name, *offset as u64),
            other => Err(format!("{other:?} is no value")),
        }
    }

    fn value_of(&mut self, name: &str, offset: u64) -> Built<Slot> {
        match self.find(name) {
            Some(Named::Register(slot)) if offset == 0 => Ok(slot),
            Some(Named::Memory(at)) => Ok(self.constant(at.wrapping_add(offset))),
            Some(Named::Dynamic) => {
                let slot = self.new_slot(64);
                self.dynamic.push((slot, offset));
                Ok(slot)
            }
            Some(_) => Err(format!("{name} is no value")),
            None => self
                .special(name)
                .ok_or_else(|| format!("{name} is not declared")),
        }
    }

    /// The slot of a register that is written. `_` gets a new, unused slot.
    pub(crate) fn target(&mut self, operand: &Operand) -> Built<Slot> {
        let Operand::Name(name) = operand else {
            return Err(format!("{operand:?} is no register"));
        };
        if name == "_" {
            return Ok(self.new_slot(64));
        }
        match self.find(name) {
            Some(Named::Register(slot)) => Ok(slot),
            _ => Err(format!("{name} is no register")),
        }
    }

    /// A predicate that is read, and whether it is negated.
    pub(crate) fn pred_source(&mut self, operand: &Operand) -> Built<(PredSlot, bool)> {
        let (name, negated) = match operand {
            Operand::Name(name) => (name, false),
            Operand::Not(name) => (name, true),
            Operand::Integer(value) => return Ok((self.true_pred, *value == 0)),
            other => return Err(format!("{other:?} is no predicate")),
        };
        match self.find(name) {
            Some(Named::Pred(slot)) => Ok((slot, negated)),
            _ => Err(format!("{name} is no predicate")),
        }
    }

    /// A predicate that is written.
    pub(crate) fn pred_target(&mut self, operand: &Operand) -> Built<PredSlot> {
        match operand {
            Operand::Name(name) if name == "_" => Ok(self.new_pred()),
            Operand::Name(name) => match self.find(name) {
                Some(Named::Pred(slot)) => Ok(slot),
                _ => Err(format!("{name} is no predicate")),
            },
            other => Err(format!("{other:?} is no predicate")),
        }
    }

    /// The registers of a vector, or the one register of a scalar.
    pub(crate) fn targets(&mut self, operand: &Operand) -> Built<Vec<Slot>> {
        match operand {
            Operand::Vector(all) => all.iter().map(|o| self.target(o)).collect(),
            one => Ok(vec![self.target(one)?]),
        }
    }

    pub(crate) fn sources(&mut self, operand: &Operand) -> Built<Vec<Slot>> {
        match operand {
            Operand::Vector(all) => all.iter().map(|o| self.source(o)).collect(),
            one => Ok(vec![self.source(one)?]),
        }
    }

    /// An address in `space`.
    pub(crate) fn address(&mut self, operand: &Operand, space: Space) -> Built<Address> {
        let Operand::Address(base, offset) = operand else {
            return Err(format!("{operand:?} is no address"));
        };
        Ok(Address {
            base: self.source(base)?,
            offset: *offset as u64,
            space,
        })
    }
}
