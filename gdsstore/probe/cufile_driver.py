"""Opens cuFile's driver and prints what it says, as one line of JSON. Run as a script, by itself: it imports nothing of ours.

Constants and structures are those of cufile.h (CUDA 13).
"""

import ctypes
import json
import sys

NVME_SUPPORTED = 4  # CU_FILE_NVME_SUPPORTED
ROUTES = ("p2pdma", "nvfs", "dmabuf", "c2c")  # bits of CUfileP2PFlags_t


class Error(ctypes.Structure):
    _fields_ = (("err", ctypes.c_int), ("cu_err", ctypes.c_int))


class Properties(ctypes.Structure):
    _fields_ = (
        ("major_version", ctypes.c_uint),
        ("minor_version", ctypes.c_uint),
        ("poll_thresh_size", ctypes.c_size_t),
        ("max_direct_io_size", ctypes.c_size_t),
        ("dstatusflags", ctypes.c_uint),
        ("dcontrolflags", ctypes.c_uint),
        ("rest", ctypes.c_uint * 64),  # fields that are not looked at, and room for those of later versions
    )


def ask(path: str) -> dict[str, object]:
    library = ctypes.CDLL(path)
    for call in (library.cuFileDriverOpen, library.cuFileDriverGetProperties):
        call.restype = Error
    status = library.cuFileDriverOpen()
    if status.err != 0:
        return {"opened": False, "error": f"cuFileDriverOpen: error {status.err}, CUDA error {status.cu_err}"}
    said: dict[str, object] = {"opened": True}
    properties = Properties()
    if library.cuFileDriverGetProperties(ctypes.byref(properties)).err == 0:
        said["nvme_supported"] = bool(properties.dstatusflags >> NVME_SUPPORTED & 1)
        if properties.major_version:
            said["nvidia_fs_version"] = f"{properties.major_version}.{properties.minor_version}"
    if hasattr(library, "cuFileDriverGetP2PFlags"):  # since 1.16
        library.cuFileDriverGetP2PFlags.restype = Error
        flags = ctypes.c_int()
        if library.cuFileDriverGetP2PFlags(NVME_SUPPORTED, ctypes.byref(flags)).err == 0:
            said["nvme_routes"] = [name for bit, name in enumerate(ROUTES) if flags.value >> bit & 1]
    return said


if __name__ == "__main__":
    try:
        answer = ask(sys.argv[1])
    except (OSError, AttributeError) as problem:
        answer = {"opened": False, "error": str(problem)}
    print(json.dumps(answer), flush=True)
