//! The upload of tokens: the host writes them to pinned memory, and the stream copies them.
//!
//! The keys of dropout go with them, if the model drops anything.
//!
//! The device has one buffer, because the stream orders the copy after the last use. The host has
//! several, so that it can run ahead of the device.

use std::ptr::NonNull;
use std::time::Duration;

use zero_alloc::cuda::{CudaDevice, CudaEvent, CudaStream, PinnedMemory};
use zero_alloc::device::{
    AnySlice, DType, Device, DeviceError, DeviceSlice, Event, Memory, Stream,
};

use crate::cuda::embedding::{TokenLists, sort_tokens};
use crate::decoder::passes::check_batch;
use crate::decoder::sequence_part::SequencePart;
use crate::ops::dropout::Draws;
use crate::options::ModelOptions;
use crate::tensor::TensorRank;
use zero_trainer::{Batch, ModelError};

/// Pinned buffers: the number of micro-batches that the host may run ahead.
const SLOTS: usize = 4;
/// The timeout of the host's wait for the copy of an older batch.
const LIMIT: Duration = Duration::from_secs(300);

/// The words of a micro-batch on the device: inputs, targets, order and starts, a count, a word of
/// padding, and the divisor of the loss in fp64; then the keys of dropout, and the starts of
/// documents, of this rank's tokens and then, if it shares its sequences, of all tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// Of this rank.
    tokens: usize,
    /// Sequences that draw masks.
    draws: usize,
    /// Tokens of all ranks that share the sequences; 0 if this rank has all.
    whole: usize,
}

impl Layout {
    /// The words of a model that drops elements, or does not.
    pub(super) fn new(options: &ModelOptions, dropout: bool) -> Self {
        Self {
            tokens: options.tokens(),
            draws: if dropout { options.micro_batch } else { 0 },
            whole: match options.sequence_ranks {
                1 => 0,
                _ => options.micro_batch * options.seq_len,
            },
        }
    }

    pub(super) fn bytes(self) -> usize {
        (self.documents() + self.tokens + self.whole) * size_of::<u32>()
    }

    /// The first word of the keys.
    fn keys(self) -> usize {
        4 * self.tokens + 4
    }

    /// The first word of the starts of documents.
    fn documents(self) -> usize {
        self.keys() + 2 * self.draws
    }
}

/// The batches of a model.
pub(super) struct Batches {
    device: CudaDevice,
    options: ModelOptions,
    part: SequencePart,
    tensor: TensorRank,
    vocab: usize,
    layout: Layout,
    on_device: AnySlice,
    slots: Vec<Slot>,
    next: usize,
    /// Whether a batch had documents. From then on all have, because a recorded step reads their
    /// starts.
    documents: bool,
    /// Whether the batch set last draws masks of dropout.
    draws: bool,
}

impl Batches {
    /// Allocates pinned memory for micro-batches; `place` has the bytes of the layout. A rank of
    /// tensor parallelism has a part of the vocabulary.
    pub(super) fn new(
        device: &CudaDevice,
        options: &ModelOptions,
        part: SequencePart,
        (tensor, vocab): (TensorRank, usize),
        layout: Layout,
        place: AnySlice,
    ) -> Result<Self, ModelError> {
        let slots = (0..SLOTS)
            .map(|_| Slot::new(device, layout.bytes()))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            device: device.clone(),
            options: options.clone(),
            part,
            tensor,
            vocab,
            layout,
            on_device: place,
            slots,
            next: 0,
            documents: false,
            draws: false,
        })
    }

    /// Enqueues the copy of a batch.
    pub(super) fn set(&mut self, stream: &CudaStream, batch: &Batch) -> Result<(), ModelError> {
        check_batch(batch, &self.options, self.vocab)?;
        let own = self.part.batch(batch, self.options.seq_len);
        let own = own.as_ref().unwrap_or(batch);
        let Batch {
            targets,
            starts: own_starts,
            ..
        } = own;
        let inputs = &*self.tensor.of_batch(own, self.vocab);
        let layout = self.layout;
        let tokens = layout.tokens;
        let rows = batch.rows.filter(|_| layout.draws > 0);
        let draws = rows.map(|rows| Draws::new(rows, layout.draws));
        self.draws = draws.is_some();
        self.documents |= !batch.starts.is_empty();
        let slot = &mut self.slots[self.next];
        self.next = (self.next + 1) % SLOTS;
        slot.wait()?;
        let words = slot.words();
        let (words, documents) = words.split_at_mut(layout.documents());
        let (words, keys) = words.split_at_mut(layout.keys());
        let (lists, rest) = words.split_at_mut(4 * tokens);
        let (sent, lists) = lists.split_at_mut(2 * tokens);
        let (order, starts) = lists.split_at_mut(tokens);
        sent[..tokens].copy_from_slice(inputs);
        sent[tokens..].copy_from_slice(targets);
        rest[0] = sort_tokens(inputs, order, starts);
        rest[2..4].copy_from_slice(bytemuck::cast_slice(&[batch.divisor]));
        for (place, key) in keys
            .chunks_exact_mut(2)
            .zip(draws.iter().flat_map(Draws::keys))
        {
            place.copy_from_slice(&key);
        }
        let (of_rank, of_all) = documents.split_at_mut(tokens);
        if batch.starts.is_empty() {
            of_rank.fill(0);
            of_all.fill(0);
        } else {
            of_rank.copy_from_slice(own_starts);
            of_all.copy_from_slice(&batch.starts[..of_all.len()]);
        }

        // The starts of documents are last, and are not copied if there are none.
        let sent = if self.documents {
            layout.bytes()
        } else {
            layout.documents() * size_of::<u32>()
        };
        let source = slot.bytes().slice(0..sent);
        self.device
            .copy(stream, source, self.on_device.slice(0..sent))?;
        slot.copied = Some(stream.record()?);

        Ok(())
    }

    /// The lists of the batch set last.
    pub(super) fn lists(&self) -> TokenLists {
        let n = self.layout.tokens;
        let at = |i: usize| self.words(i * n, n);
        TokenLists {
            tokens: at(0),
            order: at(2),
            starts: at(3),
            segments: self.words(4 * n, 1),
        }
    }

    /// The targets of the batch set last.
    pub(super) fn targets(&self) -> DeviceSlice<u32> {
        let tokens = self.layout.tokens;
        self.words(tokens, tokens)
    }

    /// The starts of documents of the batch set last; `None` if no batch had any.
    pub(super) fn documents(&self) -> Option<DeviceSlice<u32>> {
        let Layout { tokens, .. } = self.layout;
        self.documents
            .then(|| self.words(self.layout.documents(), tokens))
    }

    /// The starts of documents of all tokens of the sequences of the batch set last; `None` if no
    /// batch had any.
    pub(super) fn whole_documents(&self) -> Option<DeviceSlice<u32>> {
        let Layout { tokens, whole, .. } = self.layout;
        if whole == 0 {
            return self.documents();
        }
        self.documents
            .then(|| self.words(self.layout.documents() + tokens, whole))
    }

    /// The keys of dropout `[batch, 2]` of the batch set last; `None` if it drops nothing.
    pub(super) fn keys(&self) -> Option<DeviceSlice<u32>> {
        let Layout { draws, .. } = self.layout;
        self.draws
            .then(|| self.words(self.layout.keys(), 2 * draws))
    }

    /// The divisor of the loss of the batch set last.
    pub(super) fn divisor(&self) -> DeviceSlice<f64> {
        let first = self.words(4 * self.layout.tokens + 2, 2).as_ptr();
        // SAFETY: two words that begin at an even one of a block, so aligned; as in `words`.
        unsafe { DeviceSlice::from_raw_parts(first.cast(), 1, self.on_device.device()) }
    }

    fn words(&self, start: usize, len: usize) -> DeviceSlice<u32> {
        let first = self.on_device.as_ptr().cast::<u32>().wrapping_add(start);
        // SAFETY: within `on_device`, which starts a block and so is aligned; the caller that made
        // that slice promised that the memory is valid and that accesses are ordered.
        unsafe { DeviceSlice::from_raw_parts(first, len, self.on_device.device()) }
    }
}

/// Pinned memory of one batch.
struct Slot {
    memory: PinnedMemory,
    ptr: NonNull<u8>,
    len_bytes: usize,
    /// The completion of the copy from this slot.
    copied: Option<CudaEvent>,
}

// SAFETY: the slot owns its memory; the address is not tied to a thread.
unsafe impl Send for Slot {}

impl Slot {
    fn new(device: &CudaDevice, len_bytes: usize) -> Result<Self, DeviceError> {
        let memory = PinnedMemory::new(device);
        let ptr = memory.allocate(len_bytes)?;
        Ok(Self {
            memory,
            ptr,
            len_bytes,
            copied: None,
        })
    }

    /// Waits until the copy from this slot has run.
    fn wait(&mut self) -> Result<(), DeviceError> {
        if let Some(copied) = &self.copied {
            copied.synchronize(LIMIT)?;
        }
        self.copied = None;
        Ok(())
    }

    /// The memory; after [`Self::wait`].
    fn words(&mut self) -> &mut [u32] {
        debug_assert!(self.copied.is_none());
        // SAFETY: aligned for u32, allocated with this length, initialised as all host memory; no
        // copy from it is in progress.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.ptr.as_ptr().cast(),
                self.len_bytes / size_of::<u32>(),
            )
        }
    }

    fn bytes(&self) -> AnySlice {
        // SAFETY: valid until the slot is dropped, which waits for the copy; the host writes it
        // after `wait` only.
        unsafe {
            AnySlice::from_raw_parts(
                self.ptr.as_ptr(),
                self.len_bytes,
                DType::U8,
                self.memory.id(),
            )
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let copies = self.copied.as_ref().is_some_and(|copied| {
            let _ = copied.synchronize(LIMIT);
            // Also on a failed stream; an error means that the copy has run or never will.
            copied.is_done() == Ok(false)
        });
        // Memory that the stream still reads is leaked.
        if !copies {
            // SAFETY: allocated with these bytes; the copy from it has run, or never will.
            unsafe { self.memory.deallocate(self.ptr, self.len_bytes) };
        }
    }
}
