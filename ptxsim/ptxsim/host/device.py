"""Simulated GPU as host programs see it: its attributes, properties, occupancy and error codes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

NAMES = {90: "ptxsim sm_90a", 100: "ptxsim sm_100a"}
"""Device names by architecture."""

DEFAULT_SHARED = 48 * 1024
"""Bytes of shared memory that a block can use without an opt-in."""

OPT_IN_SHARED = 227 * 1024
SM_SHARED = 228 * 1024
RESERVED_SHARED = 1024
REGISTERS = 65536

ERRORS = {
    0: ("Success", "no error"),
    1: ("InvalidValue", "invalid argument"),
    2: ("MemoryAllocation", "out of memory"),
    3: ("InitializationError", "initialization error (the process was forked after its first CUDA call?)"),
    9: ("InvalidConfiguration", "invalid configuration argument"),
    12: ("InvalidPitchValue", "invalid pitch argument"),
    13: ("InvalidSymbol", "invalid device symbol"),
    17: ("InvalidDevicePointer", "invalid device pointer"),
    52: ("MissingConfiguration", "__global__ function call is not configured"),
    98: ("InvalidDeviceFunction", "invalid device function"),
    101: ("InvalidDevice", "invalid device ordinal"),
    200: ("InvalidKernelImage", "device kernel image is invalid"),
    209: ("NoKernelImageForDevice", "no kernel image is available for execution on the device"),
    218: ("InvalidPtx", "a PTX JIT compilation failed"),
    301: ("FileNotFound", "file not found"),
    400: ("InvalidResourceHandle", "invalid resource handle"),
    500: ("SymbolNotFound", "named symbol not found"),
    600: ("NotReady", "device not ready"),
    700: ("IllegalAddress", "an illegal memory access was encountered"),
    701: ("LaunchOutOfResources", "too many resources requested for launch"),
    719: ("LaunchFailure", "unspecified launch failure"),
    720: ("CooperativeLaunchTooLarge", "too many blocks in cooperative launch"),
    801: ("NotSupported", "operation not supported"),
    912: ("InvalidClusterSize", "cluster misconfiguration"),
    999: ("Unknown", "unknown error"),
}
"""Names (without the prefix) and texts of error codes."""


@dataclass
class Device:
    """The GPU that programs see.

    Attributes
    ----------
    arch : int
        90 or 100.
    sms : int
        Multiprocessors.
    memory : int
        Bytes of global memory.
    """

    arch: int
    sms: int
    memory: int

    def attributes(self) -> dict[int, int]:
        """Return device attributes by their number, which the driver and the runtime share."""
        limits = {
            1: 1024,
            2: 1024,
            3: 1024,
            4: 64,
            5: 2**31 - 1,
            6: 65535,
            7: 65535,
            8: DEFAULT_SHARED,
            9: 65536,
            10: 32,
        }
        more = {
            11: 2**31 - 1,
            12: REGISTERS,
            13: 1_980_000,
            14: 512,
            15: 1,
            16: self.sms,
            19: 1,
            30: 512,
            31: 1,
            36: 2_619_000,
        }
        memory = {37: 5120, 38: 50 << 20, 39: 2048, 40: 3, 41: 1, 51: 32, 75: self.arch // 10, 76: self.arch % 10}
        support = {
            78: 1,
            79: 1,
            80: 1,
            81: SM_SHARED,
            82: REGISTERS,
            83: 1,
            87: 2,
            89: 1,
            90: 1,
            95: 1,
            97: OPT_IN_SHARED,
        }
        newer = {106: 32, 108: 32 << 20, 109: 128 << 20, 111: RESERVED_SHARED, 115: 0, 120: 1, 127: 1, 129: 1, 134: -1}
        zero = dict.fromkeys(range(1, 148), 0)
        return {**zero, **limits, **more, **memory, **support, **newer}

    def occupancy(self, threads: int, shared: int) -> int:
        """Return how many blocks of this many threads and bytes fit on a multiprocessor (registers are not counted)."""
        if not 0 < threads <= 1024 or shared > OPT_IN_SHARED:
            return 0
        warps = -(-threads // 32)
        return min(32, 64 // warps, SM_SHARED // (shared + RESERVED_SHARED))

    def properties(self, version: int) -> bytes:
        """Return ``cudaDeviceProp`` as the runtime of CUDA 12 or 13 lays it out."""
        out = bytearray()
        values = {**self._numbers(), "name": NAMES[self.arch].encode(), "uuid": b"\1" * 16}
        for name, code, last in _FIELDS:
            if version > last:
                continue
            width = struct.calcsize(code[-1]) if code[-1] != "s" else 1
            out += b"\0" * (-len(out) % width)
            value = values.get(name, 0)
            count = int(code[:-1] or 1)
            if code[-1] == "s":
                out += struct.pack(code, value or b"")
            else:
                items = value if isinstance(value, tuple) else (value,) * count
                out += struct.pack(code, *items)
        return bytes(out + bytes(-len(out) % 8))

    def _numbers(self) -> dict[str, Any]:
        at = self.attributes()
        grids, blocks = (at[5], at[6], at[7]), (at[2], at[3], at[4])
        names = {
            "sharedMemPerBlock": 8, "regsPerBlock": 12, "warpSize": 10, "memPitch": 11, "maxThreadsPerBlock": 1,
            "clockRate": 13, "totalConstMem": 9, "major": 75, "minor": 76, "textureAlignment": 14,
            "texturePitchAlignment": 51, "deviceOverlap": 15, "multiProcessorCount": 16, "canMapHostMemory": 19,
            "surfaceAlignment": 30, "concurrentKernels": 31, "asyncEngineCount": 40, "unifiedAddressing": 41,
            "memoryClockRate": 36, "memoryBusWidth": 37, "l2CacheSize": 38, "persistingL2CacheMaxSize": 108,
            "maxThreadsPerMultiProcessor": 39, "streamPrioritiesSupported": 78, "globalL1CacheSupported": 79,
            "localL1CacheSupported": 80, "sharedMemPerMultiprocessor": 81, "regsPerMultiprocessor": 82,
            "managedMemory": 83, "singleToDoublePrecisionPerfRatio": 87, "concurrentManagedAccess": 89,
            "computePreemptionSupported": 90, "cooperativeLaunch": 95, "sharedMemPerBlockOptin": 97,
            "maxBlocksPerMultiProcessor": 106, "accessPolicyMaxWindowSize": 109, "reservedSharedMemPerBlock": 111,
            "clusterLaunch": 120, "unifiedFunctionPointers": 129, "hostNumaId": 134,
        }  # fmt: skip
        numbers = {name: at[number] for name, number in names.items()}
        return {**numbers, "totalGlobalMem": self.memory, "maxThreadsDim": blocks, "maxGridSize": grids}


def _fields() -> list[tuple[str, str, int]]:
    """Return the members of ``cudaDeviceProp``: name, struct code, and the last version that has it."""
    listed = """name:256s uuid:16s luid:8s luidDeviceNodeMask:I totalGlobalMem:Q sharedMemPerBlock:Q regsPerBlock:i
    warpSize:i memPitch:Q maxThreadsPerBlock:i maxThreadsDim:3i maxGridSize:3i clockRate:i:12 totalConstMem:Q major:i
    minor:i textureAlignment:Q texturePitchAlignment:Q deviceOverlap:i:12 multiProcessorCount:i
    kernelExecTimeoutEnabled:i:12 integrated:i canMapHostMemory:i computeMode:i:12 maxTexture1D:i maxTexture1DMipmap:i
    maxTexture1DLinear:i:12 maxTexture2D:2i maxTexture2DMipmap:2i maxTexture2DLinear:3i maxTexture2DGather:2i
    maxTexture3D:3i maxTexture3DAlt:3i maxTextureCubemap:i maxTexture1DLayered:2i maxTexture2DLayered:3i
    maxTextureCubemapLayered:2i maxSurface1D:i maxSurface2D:2i maxSurface3D:3i maxSurface1DLayered:2i
    maxSurface2DLayered:3i maxSurfaceCubemap:i maxSurfaceCubemapLayered:2i surfaceAlignment:Q concurrentKernels:i
    ECCEnabled:i pciBusID:i pciDeviceID:i pciDomainID:i tccDriver:i asyncEngineCount:i unifiedAddressing:i
    memoryClockRate:i:12 memoryBusWidth:i l2CacheSize:i persistingL2CacheMaxSize:i maxThreadsPerMultiProcessor:i
    streamPrioritiesSupported:i globalL1CacheSupported:i localL1CacheSupported:i sharedMemPerMultiprocessor:Q
    regsPerMultiprocessor:i managedMemory:i isMultiGpuBoard:i multiGpuBoardGroupID:i hostNativeAtomicSupported:i
    singleToDoublePrecisionPerfRatio:i:12 pageableMemoryAccess:i concurrentManagedAccess:i
    computePreemptionSupported:i canUseHostPointerForRegisteredMem:i cooperativeLaunch:i
    cooperativeMultiDeviceLaunch:i:12 sharedMemPerBlockOptin:Q pageableMemoryAccessUsesHostPageTables:i
    directManagedMemAccessFromHost:i maxBlocksPerMultiProcessor:i accessPolicyMaxWindowSize:i
    reservedSharedMemPerBlock:Q hostRegisterSupported:i sparseCudaArraySupported:i hostRegisterReadOnlySupported:i
    timelineSemaphoreInteropSupported:i memoryPoolsSupported:i gpuDirectRDMASupported:i
    gpuDirectRDMAFlushWritesOptions:I gpuDirectRDMAWritesOrdering:i memoryPoolSupportedHandleTypes:I
    deferredMappingCudaArraySupported:i ipcEventSupported:i clusterLaunch:i unifiedFunctionPointers:i
    reserved:63i"""
    entries = (each.split(":") for each in listed.split())
    return [(name, code, int(last[0]) if last else 99) for name, code, *last in entries]


_FIELDS = _fields()
