"""Starts the CUDA driver library and prints the GPUs it offers, as one line of JSON. Run as a script: it imports nothing of ours.

It makes no context, so that it takes no GPU memory. The attributes are those of cuda.h.
"""

import ctypes
import json

LIBRARY = "libcuda.so.1"
MAJOR, MINOR = 75, 76  # of the compute capability


def ask() -> dict[str, object]:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        return {"error": f"{LIBRARY} cannot be loaded: {error}"}
    count = ctypes.c_int()
    code = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return {"error": name_of(library, code)}
    return {"devices": [describe(library, ordinal) for ordinal in range(count.value)]}


def describe(library: ctypes.CDLL, ordinal: int) -> dict[str, object]:
    name, address = ctypes.create_string_buffer(128), ctypes.create_string_buffer(32)
    nbytes = ctypes.c_size_t()
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.cuDeviceGetName(name, len(name), ordinal)
    library.cuDeviceGetPCIBusId(address, len(address), ordinal)
    library.cuDeviceTotalMem_v2(ctypes.byref(nbytes), ordinal)
    library.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, ordinal)
    library.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, ordinal)
    return {
        "name": name.value.decode(errors="replace"),
        "pci_address": address.value.decode(errors="replace"),
        "memory_bytes": nbytes.value,
        "compute_capability": f"{major.value}.{minor.value}",
    }


def name_of(library: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    if library.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value:
        return text.value.decode()
    return f"error {code}"


if __name__ == "__main__":
    print(json.dumps(ask()), flush=True)
