"""The facts of a machine that decide which path bytes can take. Data only: no field is read from anywhere here.

A field that could not be read is None, and a note says why. Everything has a default, so that recorded facts may be short.
"""

from __future__ import annotations

import dataclasses
import json
import types
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from gdsstore.errors import ArgumentError
from gdsstore.probe.trips import Trip

FORMAT = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Gpu:
    """`pci_path`: host bridge first, then every bridge down to the GPU. `iommu`: type of its IOMMU domain, None: no IOMMU."""

    name: str | None = None
    pci_address: str | None = None
    pci_path: tuple[str, ...] = ()
    numa_node: int | None = None
    memory_bytes: int | None = None
    bar1_bytes: int | None = None
    bar1_used_bytes: int | None = None
    compute_capability: str | None = None
    iommu: str | None = None
    p2pmem: bool | None = None  # its BAR1 is registered with the kernel's P2PDMA


@dataclass(frozen=True, slots=True)
class Cuda:
    """What the CUDA driver library said. `devices`: PCI addresses of the GPUs that it offers, in its order; the first is 0."""

    error: str | None = None
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Nvidia:
    """`driver`: whether the kernel driver is loaded. `module`: "open" or "proprietary". `error`: trouble other than no GPU."""

    driver: bool | None = None
    driver_version: str | None = None
    module: str | None = None
    registry_dwords: str | None = None
    gpus: tuple[Gpu, ...] = ()
    gpus_without_driver: tuple[str, ...] = ()  # PCI addresses
    error: str | None = None
    cuda: Cuda | None = None  # None: not asked


@dataclass(frozen=True, slots=True)
class CuFileConfig:
    """Of cufile.json; None where it does not say. `block_*`: `block.*.use_pci_p2pdma`. Sizes in KiB, as they are there."""

    path: str | None = None
    error: str | None = None
    allow_compat_mode: bool | None = None
    force_compat_mode: bool | None = None
    use_pci_p2pdma: bool | None = None
    block_nvme: bool | None = None
    block_nvmeof: bool | None = None
    block_raid: bool | None = None
    block_inside_fs: bool = False  # cuFile ignores a "block" section there
    max_device_pinned_mem_size_kb: int | None = None
    max_device_cache_size_kb: int | None = None
    max_direct_io_size_kb: int | None = None


@dataclass(frozen=True, slots=True)
class CuFileDriver:
    """What cuFileDriverOpen said. `nvme_routes`: of "p2pdma", "nvfs", "dmabuf", "c2c"; None where cuFile cannot tell."""

    opened: bool = False
    error: str | None = None
    hung: bool = False  # it did not return in time
    nvme_supported: bool | None = None
    nvme_routes: tuple[str, ...] | None = None
    nvidia_fs_version: str | None = None


@dataclass(frozen=True, slots=True)
class CuFile:
    library: str | None = None
    version: str | None = None
    config: CuFileConfig = field(default_factory=CuFileConfig)
    driver: CuFileDriver | None = None  # None: not asked


@dataclass(frozen=True, slots=True)
class NvidiaFs:
    """`modules`: the storage drivers that registered with it. `device_nodes`: /dev/nvidia-fs* in this container."""

    loaded: bool | None = None
    version: str | None = None
    modules: tuple[str, ...] = ()
    io_stats: bool | None = None
    device_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Kernel:
    """`io_uring`: "works", or the errno's name that io_uring_setup gave. `memlock_bytes`: -1 for no limit."""

    release: str | None = None
    machine: str | None = None
    wsl: bool | None = None
    virtual_machine: bool | None = None
    p2pdma: bool | None = None  # built with CONFIG_PCI_P2PDMA
    nvme_multipath: bool | None = None
    nvme_transports: tuple[str, ...] = ()  # of every NVMe controller here
    io_uring: str | None = None
    io_uring_disabled: int | None = None
    memlock_bytes: int | None = None
    transparent_hugepages: str | None = None
    hugepages_2m_free: int | None = None
    hugepages_1g_free: int | None = None


@dataclass(frozen=True, slots=True)
class Packages:
    """Versions of what is installed. `nixl_plugins`: names without "libplugin_"."""

    kvikio: str | None = None
    nixl: str | None = None
    nixl_plugins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Environment:
    """Environment variables that change a path, as they are set."""

    pytorch_alloc_conf: str | None = None
    cuda_visible_devices: str | None = None
    kvikio_compat_mode: str | None = None
    cufile_allow_compat_mode: str | None = None
    cufile_force_compat_mode: str | None = None
    cufile_use_pcip2pdma: str | None = None
    nixl_plugin_dir: str | None = None


@dataclass(frozen=True, slots=True)
class Container:
    """`kind`: "kubernetes", "docker", "podman", "other", or None for no container. `udev`: /run/udev can be read."""

    kind: str | None = None
    privileged: bool | None = None
    udev: bool | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """A block device that is not a drive. `kind`: "dm", "md", "loop" or "ram"; `detail`: "LVM-...", "raid0", a file's name."""

    name: str
    kind: str
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Drive:
    """`kind`: "nvme", "virtio", "scsi" (and SATA) or "other". `transport`: NVMe's, "pcie" where it is in this machine."""

    name: str
    kind: str
    model: str | None = None
    transport: str | None = None
    pci_address: str | None = None
    pci_path: tuple[str, ...] = ()
    numa_node: int | None = None
    iommu: str | None = None
    scheduler: str | None = None
    rotational: bool | None = None


@dataclass(frozen=True, slots=True)
class Storage:
    """What lies under a path, top to bottom. `journal_mode`: ext4's, as used; `mount_options` has what was asked for.

    `udev_usage`: udev's ID_FS_USAGE of the device; None: not there.
    """

    path: str | None = None
    mount_point: str | None = None
    source: str | None = None
    device: str | None = None  # major:minor
    fs_type: str | None = None
    mount_options: tuple[str, ...] = ()
    journal_mode: str | None = None
    free_bytes: int | None = None
    writable: bool | None = None
    o_direct: bool | None = None
    memory_alignment: int | None = None
    udev_usage: str | None = None
    layers: tuple[Layer, ...] = ()
    drives: tuple[Drive, ...] = ()


@dataclass(frozen=True, slots=True)
class MachineFacts:
    kernel: Kernel = field(default_factory=Kernel)
    nvidia: Nvidia = field(default_factory=Nvidia)
    cufile: CuFile = field(default_factory=CuFile)
    nvidia_fs: NvidiaFs = field(default_factory=NvidiaFs)
    packages: Packages = field(default_factory=Packages)
    environment: Environment = field(default_factory=Environment)
    container: Container = field(default_factory=Container)
    storage: Storage = field(default_factory=Storage)
    round_trips: tuple[Trip, ...] = ()  # what was tried, in this order
    notes: tuple[str, ...] = ()  # what could not be read, and why

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: dicts, lists, strings, numbers, booleans, None."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return {"format": FORMAT, **plain}

    @classmethod
    def from_dict(cls, data: object) -> MachineFacts:
        """The facts that `to_dict` made. Raises ArgumentError for anything else, naming the field."""
        if not isinstance(data, dict):
            raise ArgumentError("facts are a JSON object")
        found = data.get("format", FORMAT)
        if found != FORMAT:
            raise ArgumentError(
                "these facts are of another version of gdsstore: record them anew", format=found
            )
        facts = {name: value for name, value in data.items() if name != "format"}
        return build(cls, facts, "facts")


def build(kind: type[T], data: object, where: str) -> T:
    """A dataclass of JSON's values. Raises ArgumentError for what it is not, naming the field as inside `where`."""
    if not isinstance(data, dict):
        raise ArgumentError(f"{where} must be a JSON object")
    hints = get_type_hints(kind)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise ArgumentError(f"{where} has no field {unknown[0]!r}")
    try:
        return kind(**{name: _value(hints[name], value, f"{where}.{name}") for name, value in data.items()})
    except TypeError as error:  # a field without a default is missing
        raise ArgumentError(f"{where}: {error}") from error


def _value(hint: Any, data: Any, where: str) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        if data is None:
            return None
        (hint,) = (each for each in get_args(hint) if each is not type(None))
    if get_origin(hint) is tuple:
        if not isinstance(data, list):
            raise ArgumentError(f"{where} must be a list")
        return tuple(_value(get_args(hint)[0], each, f"{where}[{at}]") for at, each in enumerate(data))
    if dataclasses.is_dataclass(hint):
        return build(hint, data, where)  # type: ignore[arg-type]
    if issubclass(hint, StrEnum):
        if data not in list(hint):
            raise ArgumentError(f"{where} must be one of {', '.join(hint)}, not {data!r}")
        return hint(data)
    if type(data) is not hint:  # not isinstance: True is no number here
        raise ArgumentError(f"{where} must be {hint.__name__}, not {type(data).__name__}")
    return data
