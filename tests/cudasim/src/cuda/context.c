/* context.c - primary and created contexts, and each thread's stack of current ones. */
#include <stdlib.h>

#include "driver.h"

#define MAX_DEPTH 32

static __thread struct {
    CUcontext stack[MAX_DEPTH];
    int depth;
} tls;

CUcontext current(void) { return tls.depth ? tls.stack[tls.depth - 1] : NULL; }

static bool alive(CUcontext ctx)
{
    LOCK();
    bool yes = ctx && ctx->alive;
    UNLOCK();
    return yes;
}

/* ---- primary contexts ---- */

EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice dev)
{
    ENTER("cuDevicePrimaryCtxRetain");
    if (!valid_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
    LOCK();
    *ctx = &drv.dev[dev].primary;
    (*ctx)->refs++;
    (*ctx)->alive = true;
    UNLOCK();
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice dev)
{
    ENTER("cuDevicePrimaryCtxRelease");
    if (!valid_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
    LOCK();
    CUcontext ctx = &drv.dev[dev].primary;
    CUresult res = ctx->refs ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    if (ctx->refs && --ctx->refs == 0) ctx->alive = false;
    UNLOCK();
    return res;
}

EXPORT CUresult CUDAAPI cuDevicePrimaryCtxReset(CUdevice dev)
{
    ENTER("cuDevicePrimaryCtxReset");
    return valid_device(dev) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult CUDAAPI cuDevicePrimaryCtxSetFlags(CUdevice dev, unsigned flags)
{
    ENTER("cuDevicePrimaryCtxSetFlags");
    if (!valid_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
    LOCK();
    drv.dev[dev].primary.flags = flags;
    UNLOCK();
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice dev, unsigned *flags, int *active)
{
    ENTER("cuDevicePrimaryCtxGetState");
    if (!valid_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
    LOCK();
    *flags = drv.dev[dev].primary.flags;
    *active = drv.dev[dev].primary.alive;
    UNLOCK();
    return CUDA_SUCCESS;
}

/* ---- created contexts ---- */

static CUresult create(CUcontext *out, unsigned flags, CUdevice dev)
{
    if (!valid_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
    CUcontext ctx = tls.depth < MAX_DEPTH ? calloc(1, sizeof *ctx) : NULL;
    if (!ctx) return CUDA_ERROR_OUT_OF_MEMORY;
    *ctx = (struct CUctx_st){ .dev = dev, .refs = 1, .alive = true, .flags = flags };
    tls.stack[tls.depth++] = *out = ctx;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxCreate(CUcontext *out, CUctxCreateParams *params, unsigned flags, CUdevice dev)
{
    (void)params;
    ENTER("cuCtxCreate");
    return create(out, flags, dev);
}

/* The three-argument form, which cuGetProcAddress gives to programs built for CUDA 12 and older. */
EXPORT CUresult cuCtxCreate_v2(CUcontext *out, unsigned flags, CUdevice dev)
{
    ENTER("cuCtxCreate");
    return create(out, flags, dev);
}

EXPORT CUresult CUDAAPI cuCtxDestroy(CUcontext ctx)
{
    ENTER("cuCtxDestroy");
    if (!alive(ctx) || ctx->primary) return CUDA_ERROR_INVALID_CONTEXT;
    LOCK();
    ctx->alive = false; /* the struct stays: streams and ranges may still name it */
    UNLOCK();
    if (current() == ctx) tls.depth--;
    return CUDA_SUCCESS;
}

/* ---- the current context ---- */

EXPORT CUresult CUDAAPI cuCtxPushCurrent(CUcontext ctx)
{
    ENTER("cuCtxPushCurrent");
    if (!alive(ctx)) return CUDA_ERROR_INVALID_CONTEXT;
    if (tls.depth == MAX_DEPTH) return CUDA_ERROR_INVALID_VALUE;
    tls.stack[tls.depth++] = ctx;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxPopCurrent(CUcontext *ctx)
{
    ENTER("cuCtxPopCurrent");
    if (!tls.depth) return CUDA_ERROR_INVALID_CONTEXT;
    tls.depth--;
    if (ctx) *ctx = tls.stack[tls.depth];
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxSetCurrent(CUcontext ctx)
{
    ENTER("cuCtxSetCurrent");
    if (ctx && !alive(ctx)) return CUDA_ERROR_INVALID_CONTEXT;
    if (ctx) { /* replaces the top of the stack; NULL pops it */
        if (!tls.depth) tls.depth = 1;
        tls.stack[tls.depth - 1] = ctx;
    } else if (tls.depth) {
        tls.depth--;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxGetCurrent(CUcontext *ctx)
{
    ENTER("cuCtxGetCurrent");
    *ctx = current();
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxGetDevice(CUdevice *dev)
{
    ENTER("cuCtxGetDevice");
    if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
    *dev = current()->dev;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxGetFlags(unsigned *flags)
{
    ENTER("cuCtxGetFlags");
    if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
    *flags = current()->flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxGetId(CUcontext ctx, unsigned long long *id)
{
    ENTER("cuCtxGetId");
    if (!ctx) ctx = current();
    if (!ctx) return CUDA_ERROR_INVALID_CONTEXT;
    *id = (unsigned long long)(uintptr_t)ctx;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxGetApiVersion(CUcontext ctx, unsigned *version)
{
    (void)ctx;
    ENTER("cuCtxGetApiVersion");
    *version = 3020;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER("cuCtxGetStreamPriorityRange");
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxSynchronize(void)
{
    ENTER("cuCtxSynchronize");
    return drain_all();
}
