//! The exchange of tokens for heads between ranks that share sequences (DeepSpeed-Ulysses, arXiv
//! 2309.14509).
//!
//! S ranks have T / S consecutive tokens of each sequence with all heads. For attention each has all
//! tokens with the heads of its queries, and of their keys and values: fewer heads of keys than
//! ranks are copied to the ranks that need them, and their gradients are summed on the way back. An
//! exchange is an all-to-all of segments, between two of the operations below.
//!
//! Shapes: tokens `[batch, T / S, heads + 2 kv_heads, d]`, queries first and values last; heads
//! `[batch, T, h + 2 k, d]` with h = heads / S and k = max(1, kv_heads / S), or 0 without keys;
//! segments `[S, batch, T / S, h + 2 k, d]`, one for each rank.

use std::ops::Range;

use rayon::prelude::*;

use super::rows_per_thread;

/// The sizes of an exchange.
#[derive(Clone, Copy, Debug)]
pub struct HeadExchange {
    /// Ranks that share the sequences, S. It divides `seq` and `heads`; it divides `kv_heads` or is
    /// a multiple of them.
    pub ranks: usize,
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence, T.
    pub seq: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys, and of values; 0 if there are only queries.
    pub kv_heads: usize,
    /// Elements of a head.
    pub d: usize,
}

impl HeadExchange {
    /// The heads of queries and of keys of a rank.
    pub fn heads_of_rank(self) -> [usize; 2] {
        let copied = usize::from(self.kv_heads > 0);
        [
            self.heads / self.ranks,
            (self.kv_heads / self.ranks).max(copied),
        ]
    }

    /// Elements of the heads, and of the segments.
    pub fn elems(self) -> usize {
        self.batch * self.seq * self.row()
    }

    /// Elements of a rank's tokens.
    pub fn tokens_elems(self) -> usize {
        self.batch * self.tokens() * self.token()
    }

    /// Elements of a token's heads of a rank.
    fn row(self) -> usize {
        let [h, k] = self.heads_of_rank();
        (h + 2 * k) * self.d
    }

    /// Elements of a token.
    fn token(self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.d
    }

    /// Tokens of a sequence that a rank has.
    fn tokens(self) -> usize {
        self.seq / self.ranks
    }

    /// The rank of row `row` of the segments, and its token on that rank.
    fn segment_row(self, row: usize) -> [usize; 2] {
        let tokens = self.batch * self.tokens();
        [row / tokens, row % tokens]
    }

    /// The row of the heads, `[batch, T]`, of token `token` of rank `rank`, `[batch, T / S]`.
    fn heads_row(self, rank: usize, token: usize) -> usize {
        let tokens = self.tokens();
        token / tokens * self.seq + rank * tokens + token % tokens
    }

    /// The first head of keys of a rank.
    fn first_key(self, rank: usize) -> usize {
        rank * self.kv_heads / self.ranks
    }

    /// The elements of a token that rank `rank` has, and their places in its row: of queries, keys
    /// and values.
    fn parts(self, rank: usize) -> [(Range<usize>, Range<usize>); 3] {
        let [h, k] = self.heads_of_rank();
        let keys = self.heads + self.first_key(rank);
        let part = |from: usize, to: usize, heads: usize| {
            let elems = |first: usize| first * self.d..(first + heads) * self.d;
            (elems(from), elems(to))
        };
        [
            part(rank * h, 0, h),
            part(keys, h, k),
            part(keys + self.kv_heads, h + k, k),
        ]
    }

    /// Writes the segments of `tokens`.
    pub fn pack_tokens(self, segments: &mut [f32], tokens: &[f32]) {
        let token = self.token();
        each_row(segments, self.row(), |row, out| {
            let [rank, index] = self.segment_row(row);
            let from = &tokens[index * token..][..token];
            for (source, place) in self.parts(rank) {
                out[place].copy_from_slice(&from[source]);
            }
        });
    }

    /// Writes the heads from the segments of all ranks.
    pub fn unpack_heads(self, heads: &mut [f32], segments: &[f32]) {
        let width = self.row();
        let tokens = self.tokens();
        each_row(heads, width, |row, out| {
            let sequence = row / self.seq;
            let token = row % self.seq;
            let rank = token / tokens;
            let from = (rank * self.batch + sequence) * tokens + token % tokens;
            out.copy_from_slice(&segments[from * width..][..width]);
        });
    }

    /// Writes the segments of `heads`: the reverse of [`Self::unpack_heads`].
    pub fn pack_heads(self, segments: &mut [f32], heads: &[f32]) {
        let width = self.row();
        each_row(segments, width, |row, out| {
            let [rank, token] = self.segment_row(row);
            let from = self.heads_row(rank, token);
            out.copy_from_slice(&heads[from * width..][..width]);
        });
    }

    /// Writes the tokens from the segments of all ranks. Copies of a head of keys are summed, in the
    /// order of the ranks.
    pub fn unpack_tokens(self, tokens: &mut [f32], segments: &[f32]) {
        let width = self.row();
        let rows = self.batch * self.tokens();
        each_row(tokens, self.token(), |row, out| {
            for rank in 0..self.ranks {
                let from = &segments[(rank * rows + row) * width..][..width];
                let again = rank > 0 && self.first_key(rank) == self.first_key(rank - 1);
                let [queries, keys, values] = self.parts(rank);
                out[queries.0].copy_from_slice(&from[queries.1]);
                for (place, source) in [keys, values] {
                    if !again {
                        out[place].copy_from_slice(&from[source]);
                        continue;
                    }
                    for (sum, x) in out[place].iter_mut().zip(&from[source]) {
                        *sum += x;
                    }
                }
            }
        });
    }
}

/// Calls `write` with each row of `out`, of `width` elements, on all threads.
fn each_row(out: &mut [f32], width: usize, write: impl Fn(usize, &mut [f32]) + Sync) {
    let rows = rows_per_thread(out.len() / width);
    out.par_chunks_mut(rows * width)
        .enumerate()
        .for_each(|(chunk, out)| {
            for (i, out) in out.chunks_exact_mut(width).enumerate() {
                write(chunk * rows + i, out);
            }
        });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ops::Threads;

    /// The value of an element that names itself: its sequence, token, head and place in the head.
    fn name([b, t, head, i]: [usize; 4]) -> f32 {
        (((b * 32 + t) * 64 + head) * 4 + i) as f32
    }

    /// The tokens of `rank` with the names of their elements.
    fn tokens_of(x: HeadExchange, rank: usize) -> Vec<f32> {
        let tokens = x.seq / x.ranks;
        let heads = x.heads + 2 * x.kv_heads;
        let mut out = Vec::new();
        for b in 0..x.batch {
            for t in rank * tokens..(rank + 1) * tokens {
                for head in 0..heads {
                    out.extend((0..x.d).map(|i| name([b, t, head, i])));
                }
            }
        }
        out
    }

    /// The heads of a token that attention of `rank` reads: by the queries' heads one by one.
    fn wanted_heads(x: HeadExchange, rank: usize) -> Vec<usize> {
        let of_queries: Vec<usize> = (0..x.heads)
            .filter(|h| h * x.ranks / x.heads == rank)
            .collect();
        let mut keys: Vec<usize> = of_queries
            .iter()
            .map(|h| h * x.kv_heads / x.heads)
            .collect();
        keys.dedup();
        if x.kv_heads == 0 {
            keys.clear();
        }
        let of = |first: usize| keys.iter().map(move |key| first + key);
        let all = of_queries.iter().copied();
        all.chain(of(x.heads))
            .chain(of(x.heads + x.kv_heads))
            .collect()
    }

    /// The all-to-all of segments.
    fn all_to_all(x: HeadExchange, sent: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let n = x.elems() / x.ranks;
        let of = |rank: usize| {
            sent.iter()
                .flat_map(move |s| s[rank * n..(rank + 1) * n].to_vec())
        };
        (0..x.ranks).map(|rank| of(rank).collect()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::with_cases(64)
        })]

        #[test]
        fn heads_have_all_tokens_and_return(
            ranks_log in 0u32..3,
            batch in 1usize..4,
            tokens in 1usize..5,
            kv_log in 0u32..4,
            group in 1usize..4,
            keys in any::<bool>(),
            d in 1usize..4,
            threads in 1usize..4,
        ) {
            let ranks = 1usize << ranks_log;
            let kv_heads = 1usize << kv_log;
            let heads = kv_heads.max(ranks) * group;
            let kv_heads = if keys { kv_heads } else { 0 };
            let x = HeadExchange { ranks, batch, seq: ranks * tokens, heads, kv_heads, d };
            Threads::new(threads).unwrap().run(|| {
                let sent: Vec<_> = (0..ranks)
                    .map(|rank| {
                        let mut out = vec![f32::NAN; x.elems()];
                        x.pack_tokens(&mut out, &tokens_of(x, rank));
                        out
                    })
                    .collect();
                let mut back = Vec::new();
                for (rank, received) in all_to_all(x, &sent).iter().enumerate() {
                    let mut got = vec![f32::NAN; x.elems()];
                    x.unpack_heads(&mut got, received);
                    let mut want = Vec::new();
                    for b in 0..batch {
                        for t in 0..x.seq {
                            for head in wanted_heads(x, rank) {
                                want.extend((0..d).map(|i| name([b, t, head, i])));
                            }
                        }
                    }
                    assert_eq!(got, want, "{x:?}, rank {rank}");
                    let mut out = vec![f32::NAN; x.elems()];
                    x.pack_heads(&mut out, &got);
                    assert_eq!(&out, received, "{x:?}, rank {rank}: the reverse");
                    back.push(out);
                }

                // Each copy of a head of keys returns its name once.
                let copies = |head: usize| {
                    let has = |rank: &usize| wanted_heads(x, *rank).contains(&head);
                    (0..ranks).filter(has).count()
                };
                for (rank, received) in all_to_all(x, &back).iter().enumerate() {
                    let mut want = tokens_of(x, rank);
                    for (i, value) in want.iter_mut().enumerate() {
                        // Sums of a few equal integers below 2^16 are exact.
                        *value *= copies(i / d % (heads + 2 * kv_heads)) as f32;
                    }
                    let mut got = vec![f32::NAN; want.len()];
                    x.unpack_tokens(&mut got, received);
                    assert_eq!(got, want, "{x:?}, rank {rank}: tokens");
                }
            });
        }
    }
}
