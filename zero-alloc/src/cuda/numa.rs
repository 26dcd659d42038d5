//! NUMA nodes: that of a GPU, memory on it, and cores of it.
//!
//! Linux describes nodes, PCI devices and cores as files under `/sys`. Nothing here acts on a
//! machine with one node.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::ptr::NonNull;

use super::driver::Driver;
use crate::device::DeviceError;

/// Greatest number of a core that is bound.
const MAX_CORES: usize = 1024;

/// The files under a folder such as `/sys`.
struct Topology(PathBuf);

impl Topology {
    fn of_system() -> Self {
        Self("/sys".into())
    }

    fn read(&self, path: &str) -> Option<String> {
        Some(
            std::fs::read_to_string(self.0.join(path))
                .ok()?
                .trim()
                .to_owned(),
        )
    }

    fn list(&self, path: &str) -> Vec<usize> {
        self.read(path)
            .map(|text| parse_list(&text))
            .unwrap_or_default()
    }

    /// The node of the PCI device, if the system has several nodes and says which one it is.
    fn node_of(&self, pci_address: &str) -> Option<usize> {
        let nodes = self.list("devices/system/node/online");
        // -1 if unknown.
        let node = self
            .read(&format!("bus/pci/devices/{pci_address}/numa_node"))?
            .parse()
            .ok()?;
        (nodes.len() > 1 && nodes.contains(&node)).then_some(node)
    }

    /// The cores of a node, so that those of one physical core (hyper-threads) are neighbours.
    fn cores(&self, node: usize) -> Vec<usize> {
        let mut cores = self.list(&format!("devices/system/node/node{node}/cpulist"));
        cores.sort_by_cached_key(|&core| {
            let siblings = self.list(&format!(
                "devices/system/cpu/cpu{core}/topology/thread_siblings_list"
            ));
            (siblings.first().copied().unwrap_or(core), core)
        });
        cores
    }

    /// The cores for rank `own` of ranks on the devices `pci_addresses`: the allowed cores of its
    /// device's node, divided among the ranks of that node, unless it is part of them and not to be
    /// divided. `None`: leave the rank's cores as they are.
    fn share(
        &self,
        pci_addresses: &[String],
        own: usize,
        allowed: &BTreeSet<usize>,
        divide: bool,
    ) -> Option<Vec<usize>> {
        let node = self.node_of(pci_addresses.get(own)?)?;
        let all = self.cores(node);
        let cores: Vec<_> = all
            .iter()
            .copied()
            .filter(|core| allowed.contains(core))
            .collect();
        let on_node = |addresses: &[String]| {
            addresses
                .iter()
                .filter(|at| self.node_of(at) == Some(node))
                .count()
        };

        let nth = on_node(&pci_addresses[..own]);
        let ranks = on_node(pci_addresses);
        let range = if (divide || cores.len() == all.len()) && cores.len() >= ranks {
            cores.len() * nth / ranks..cores.len() * (nth + 1) / ranks
        } else {
            0..cores.len()
        };

        Some(cores[range].to_vec()).filter(|cores| !cores.is_empty())
    }
}

/// The numbers of a list such as `0-3,8`; parts that are no ranges are skipped.
fn parse_list(text: &str) -> Vec<usize> {
    let part = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (last < 1 << 16).then_some(first..=last)
    };
    text.split(',').filter_map(part).flatten().collect()
}

/// The node of a GPU; `None` if the machine has one node, or the system does not say.
pub(super) fn node_of(ordinal: usize) -> Option<usize> {
    Topology::of_system().node_of(&Driver::pci_address(ordinal).ok()?)
}

/// Makes the system take the pages of a new mapping from `node`, while that has free memory.
pub(super) fn prefer(at: NonNull<u8>, bytes: usize, node: usize) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        const BITS: usize = libc::c_ulong::BITS as usize;
        let mut nodes: [libc::c_ulong; 16] = [0; 16];
        *nodes
            .get_mut(node / BITS)
            .ok_or(io::ErrorKind::Unsupported)? = 1 << (node % BITS);
        let mode = libc::c_long::from(libc::MPOL_PREFERRED);
        let bits = (nodes.len() * BITS + 1) as libc::c_ulong;
        // SAFETY: reads the set of nodes; changes only where the pages of the range will be.
        let code = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                at.as_ptr(),
                bytes,
                mode,
                nodes.as_ptr(),
                bits,
                0,
            )
        };
        if code == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    #[cfg(not(target_os = "linux"))]
    {
        let _ = (at, bytes, node);
        Ok(())
    }
}

/// Binds this thread, and the threads that it starts from now on, to cores near a GPU. `ordinals`
/// are the GPUs of all ranks of this machine, and `own` is the index of this process's rank among
/// them. The cores of the GPU's NUMA node are divided among the ranks of that node. Cores on which
/// the process may not run (`taskset`, control groups) are left out; if there are such cores and
/// `divide` is false, the rank gets all others of the node: its launcher has given each rank its
/// own.
///
/// Call it before the process starts other threads and opens the GPU. Returns the cores; `None` if
/// nothing was bound: one node, a system that does not say which node the GPU is on, or no allowed
/// core on it.
///
/// # Errors
/// There is no such GPU, or the driver or the system failed.
pub fn bind_to_node(
    ordinals: &[usize],
    own: usize,
    divide: bool,
) -> Result<Option<Vec<usize>>, DeviceError> {
    let addresses = ordinals
        .iter()
        .map(|&ordinal| Driver::pci_address(ordinal))
        .collect::<Result<Vec<_>, _>>()?;
    let failed = |call| {
        move |error: io::Error| DeviceError::Driver {
            call,
            message: error.to_string(),
        }
    };
    let allowed = affinity::get().map_err(failed("sched_getaffinity"))?;
    let cores = Topology::of_system().share(&addresses, own, &allowed, divide);
    if let Some(cores) = &cores {
        affinity::set(cores).map_err(failed("sched_setaffinity"))?;
    }
    Ok(cores)
}

/// The cores on which this thread may run.
#[cfg(target_os = "linux")]
mod affinity {
    use std::collections::BTreeSet;
    use std::io;

    use super::MAX_CORES;

    /// A set of cores as the system calls use it.
    type Mask = [libc::c_ulong; MAX_CORES / libc::c_ulong::BITS as usize];

    fn bit(core: usize) -> (usize, libc::c_ulong) {
        (
            core / libc::c_ulong::BITS as usize,
            1 << (core % libc::c_ulong::BITS as usize),
        )
    }

    pub(super) fn get() -> io::Result<BTreeSet<usize>> {
        let mut mask: Mask = [0; _];
        let at = (&raw mut mask).cast();
        // SAFETY: writes at most the size of the mask; 0 is this thread.
        if unsafe { libc::sched_getaffinity(0, size_of::<Mask>(), at) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok((0..MAX_CORES)
            .filter(|&core| mask[bit(core).0] & bit(core).1 != 0)
            .collect())
    }

    pub(super) fn set(cores: &[usize]) -> io::Result<()> {
        let mut mask: Mask = [0; _];
        for &core in cores.iter().filter(|&&core| core < MAX_CORES) {
            mask[bit(core).0] |= bit(core).1;
        }
        // SAFETY: reads the mask; 0 is this thread.
        let code =
            unsafe { libc::sched_setaffinity(0, size_of::<Mask>(), (&raw const mask).cast()) };
        if code == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod affinity {
    use std::collections::BTreeSet;
    use std::io;

    pub(super) fn get() -> io::Result<BTreeSet<usize>> {
        Ok(BTreeSet::new())
    }

    pub(super) fn set(_cores: &[usize]) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    /// A tree with these files, removed on drop.
    struct Tree(Topology);

    impl Tree {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let root =
                std::env::temp_dir().join(format!("zero-alloc-{name}-{}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, format!("{text}\n")).unwrap();
            }
            Self(Topology(root))
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0.0);
        }
    }

    fn addresses(numbers: &[usize]) -> Vec<String> {
        numbers
            .iter()
            .map(|n| format!("0000:{n:02x}:00.0"))
            .collect()
    }

    /// Two nodes of 4 physical cores with two threads each; GPUs 0 and 1 on node 0, 2 on node 1, 3
    /// unknown.
    fn two_nodes() -> Tree {
        let mut files = vec![
            ("devices/system/node/online".to_owned(), "0-1".to_owned()),
            (
                "devices/system/node/node0/cpulist".into(),
                "0-3,8-11".into(),
            ),
            (
                "devices/system/node/node1/cpulist".into(),
                "4-7,12-15".into(),
            ),
        ];

        for (gpu, node) in addresses(&[0, 1, 2, 3]).iter().zip(["0", "0", "1", "-1"]) {
            files.push((format!("bus/pci/devices/{gpu}/numa_node"), node.into()));
        }
        for core in 0..16 {
            let siblings = format!("{},{}", core % 8, core % 8 + 8);
            files.push((
                format!("devices/system/cpu/cpu{core}/topology/thread_siblings_list"),
                siblings,
            ));
        }

        let files: Vec<_> = files
            .iter()
            .map(|(path, text)| (path.as_str(), text.as_str()))
            .collect();
        Tree::new("two-nodes", &files)
    }

    #[test]
    fn cores_of_a_node_are_divided_among_its_ranks() {
        let tree = two_nodes();
        let all: BTreeSet<_> = (0..16).collect();
        let share = |gpus: &[usize], own, allowed: &BTreeSet<usize>, divide| {
            tree.0.share(&addresses(gpus), own, allowed, divide)
        };
        // Both threads of a physical core go to one rank.
        assert_eq!(share(&[0, 1, 2], 0, &all, true), Some(vec![0, 8, 1, 9]));
        assert_eq!(share(&[0, 1, 2], 1, &all, true), Some(vec![2, 10, 3, 11]));
        assert_eq!(
            share(&[0, 1, 2], 2, &all, true),
            Some(vec![4, 12, 5, 13, 6, 14, 7, 15])
        );
        // Two ranks on one GPU, and an uneven division.
        assert_eq!(share(&[2, 2, 2], 2, &all, true), Some(vec![14, 7, 15]));
        // Only allowed cores; more ranks than cores share them.
        let few = BTreeSet::from([1, 9, 12]);
        assert_eq!(share(&[0, 1, 2], 1, &few, true), Some(vec![9]));
        assert_eq!(share(&[0, 0, 0], 1, &few, true), Some(vec![1, 9]));
        assert_eq!(share(&[0, 1, 2], 1, &few, false), Some(vec![1, 9]));
        assert_eq!(share(&[0, 1, 2], 1, &all, false), Some(vec![2, 10, 3, 11]));
        assert_eq!(share(&[0, 1, 2], 0, &BTreeSet::from([4]), true), None);
        // Unknown node, unknown GPU, no such rank.
        assert_eq!(share(&[3], 0, &all, true), None);
        assert_eq!(share(&[7], 0, &all, true), None);
        assert_eq!(share(&[0], 1, &all, true), None);
    }

    #[test]
    fn machine_with_one_node_has_no_node_of_a_gpu() {
        let files = [
            ("devices/system/node/online", "0"),
            ("devices/system/node/node0/cpulist", "0-3"),
            ("bus/pci/devices/0000:00:00.0/numa_node", "0"),
        ];
        let tree = Tree::new("one-node", &files);
        assert_eq!(tree.0.node_of("0000:00:00.0"), None);
        assert_eq!(
            Topology("/no/such/folder".into()).node_of("0000:00:00.0"),
            None
        );
    }

    #[test]
    fn lists_of_the_system_are_parsed() {
        assert_eq!(parse_list("0-2,5,7-8"), [0, 1, 2, 5, 7, 8]);
        assert_eq!(parse_list("3"), [3]);
        for text in ["", "-1", "a-b", "3-1", "0-99999999"] {
            assert_eq!(parse_list(text), [] as [usize; 0], "{text}");
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn thread_is_bound_to_cores() {
        // In a new thread, so that no other thread of the tests is bound.
        let bound = std::thread::spawn(|| {
            let first = *affinity::get().unwrap().first().unwrap();
            affinity::set(&[first]).unwrap();
            (first, affinity::get().unwrap())
        });
        let (first, bound) = bound.join().unwrap();
        assert_eq!(bound, BTreeSet::from([first]));
        assert!(affinity::set(&[]).is_err());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn memory_prefers_a_node() {
        let memory = crate::host::mapping::map(8192).unwrap();
        // Node 0 always exists; a system that forbids the call says so.
        if let Err(error) = prefer(memory, 8192, 0) {
            assert!(
                [Some(libc::EPERM), Some(libc::ENOSYS)].contains(&error.raw_os_error()),
                "{error}"
            );
        }
        assert!(prefer(memory, 8192, 1 << 20).is_err());
        // SAFETY: mapped above and unused.
        unsafe { crate::host::mapping::unmap(memory, 8192) };
    }
}
