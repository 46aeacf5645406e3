/* A libcuda with one captured graph and no device, for the real cuda-python to read.
 *
 * Built by test_driver_graph.py. Structures are declared here in the layout of the driver's ABI;
 * addresses are numbers, none is followed. What stands right behind a parameter is another
 * parameter, or FOREIGN: a reader that takes a byte too many finds it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define A 0x7f5a00000000ULL
#define FOREIGN 0x7fdeadbe0000ULL
#define RANGE 0x100000ULL

enum { OK = 0, INVALID_VALUE = 1, UNKNOWN_ERROR = 999 };

typedef struct {
    void *func;
    unsigned grid[3], block[3], shared;
    void **kernelParams, **extra;
    void *kern, *ctx;
} Kernel;

typedef struct {
    size_t srcX, srcY, srcZ, srcLOD;
    int srcType;
    const void *srcHost;
    uint64_t srcDevice;
    void *srcArray, *reserved0;
    size_t srcPitch, srcHeight, dstX, dstY, dstZ, dstLOD;
    int dstType;
    void *dstHost;
    uint64_t dstDevice;
    void *dstArray, *reserved1;
    size_t dstPitch, dstHeight, width, height, depth;
} Memcpy;

typedef struct {
    uint64_t dst;
    size_t pitch;
    unsigned value, elementSize;
    size_t width, height;
} Memset;

typedef struct {
    char poolProps[88];
    const void *accessDescs;
    size_t accessDescCount, bytesize;
    uint64_t dptr;
} Alloc;

typedef struct { int type, which; } Node;
typedef struct { Node *nodes; size_t count; } Graph;

/* A kernel with a function and kernelParams: sizes 8, 4, 40, 1. */
static struct { uint64_t pointer; uint32_t number, foreign_low, foreign_high, pad;
                uint64_t structure[5]; uint8_t byte, pad2[7]; uint64_t foreign; } given =
    {A + 0x1000, 7, (uint32_t)FOREIGN, FOREIGN >> 32, 0, {1, 2, A + 0x2000, 3, 4}, 5, {0}, FOREIGN};
static void *params[] = {&given.pointer, &given.number, given.structure, &given.byte};
static const size_t sizes[] = {8, 4, 40, 1};

/* A kernel without a function, its parameters packed in extra. */
static uint64_t blob[216];  /* 1,720 bytes, and FOREIGN behind */
static size_t blob_size = 1720;
static void *extra[] = {(void *)1, blob, (void *)2, &blob_size, (void *)0};
static void *odd_extra[] = {(void *)9, blob, (void *)0};

static Node child_nodes[] = {{0, 0}};
static Graph child = {child_nodes, 1};
static Node top[] = {{0, 0}, {0, 1}, {2, 0}, {1, 0}, {4, 0}, {13, 0}, {10, 0}, {3, 0},
                     {5, 0}, {1, 1}, {0, 2}, {0, 3}, {77, 0}, {11, 0}, {1, 2}};
Graph graph = {top, sizeof top / sizeof *top};

int calls_outside = 0;  /* of a context: every query must be in one */
static int depth = 0;
#define HERE() do { if (!depth) calls_outside++; } while (0)

#define F(name) fake_##name

int F(cuDeviceGet)(int *device, int index) { *device = index; return OK; }
int F(cuDevicePrimaryCtxRetain)(void **ctx, int device) { (void)device; *ctx = &depth; return OK; }
int F(cuDevicePrimaryCtxRelease)(int device) { (void)device; return OK; }
int F(cuCtxPushCurrent)(void *ctx) { (void)ctx; depth++; return OK; }
int F(cuCtxPopCurrent)(void **ctx) { *ctx = &depth; depth--; return OK; }
int F(cuThreadExchangeStreamCaptureMode)(int *mode) { *mode = 0; return OK; }

int F(cuGraphGetNodes)(Graph *g, Node **nodes, size_t *count) {
    HERE();
    if (nodes) for (size_t i = 0; i < *count && i < g->count; i++) nodes[i] = &g->nodes[i];
    *count = g->count;
    return OK;
}
int F(cuGraphNodeGetType)(Node *node, int *type) { HERE(); *type = node->type; return OK; }
int F(cuGraphKernelNodeGetParams)(Node *node, Kernel *out) {
    HERE();
    memset(out, 0, sizeof *out);
    blob[86] = A + 0x3000; blob[94] = A + 0x3000; blob[201] = A + 0x3010; blob[215] = FOREIGN;
    switch (node->which) {
    case 0: out->func = (void *)0x10; out->kernelParams = params; break;
    case 1: out->kern = (void *)0x20; out->extra = extra; break;
    case 2: out->func = (void *)0x30; out->kernelParams = params; break;  /* sizes not known */
    case 3: out->func = (void *)0x10; out->extra = odd_extra; break;
    }
    return OK;
}
int F(cuFuncGetName)(const char **name, void *f) {
    *name = f == (void *)0x10 ? "plain_kernel" : "strange_kernel"; return OK;
}
int F(cuKernelGetName)(const char **name, void *k) { (void)k; *name = "packed_kernel"; return OK; }
int F(cuFuncGetParamInfo)(void *f, size_t i, size_t *offset, size_t *size) {
    HERE();
    if (f == (void *)0x30) return UNKNOWN_ERROR;
    if (i >= 4) return INVALID_VALUE;
    *offset = 0; *size = sizes[i];
    return OK;
}
int F(cuKernelGetParamInfo)(void *k, size_t i, size_t *offset, size_t *size) {
    (void)k;
    if (i) return INVALID_VALUE;
    *offset = 0; *size = 1720;
    return OK;
}
int F(cuGraphMemsetNodeGetParams)(Node *node, Memset *out) {
    (void)node;
    *out = (Memset){A + 0x4000, 256, 0, 4, 16, 3};
    return OK;
}
int F(cuGraphMemcpyNodeGetParams)(Node *node, Memcpy *out) {
    memset(out, 0, sizeof *out);
    out->width = 64; out->height = 3; out->depth = 2;
    out->srcType = node->which == 1 ? 1 : node->which == 2 ? 3 : 2;
    out->srcHost = (void *)FOREIGN;
    out->srcDevice = A + 0x5000; out->srcX = 8; out->srcY = 2; out->srcZ = 1;
    out->srcPitch = 128; out->srcHeight = 4;
    out->dstType = 4; out->dstDevice = A + 0x6000; out->dstPitch = 64; out->dstHeight = 3;
    return OK;
}
int F(cuGraphMemAllocNodeGetParams)(Node *node, Alloc *out) {
    (void)node;
    memset(out, 0, sizeof *out);
    out->poolProps[0] = 1; out->poolProps[8] = 1;
    out->bytesize = 4096; out->dptr = A + 0x7000;
    return OK;
}
int F(cuGraphMemFreeNodeGetParams)(Node *node, uint64_t *out) {
    (void)node; *out = A + 0x7000; return OK;
}
int F(cuGraphChildGraphNodeGetGraph)(Node *node, Graph **out) {
    (void)node; *out = &child; return OK;
}
int F(cuPointerGetAttribute)(void *data, int attribute, uint64_t address) {
    HERE();
    int on_host = address >= FOREIGN && address < FOREIGN + RANGE;
    if (!on_host && (address < A || address >= A + RANGE)) return INVALID_VALUE;
    if (attribute == 2) *(unsigned *)data = on_host ? 1 : 2;
    else if (attribute == 11) *(uint64_t *)data = on_host ? FOREIGN : A;
    else if (attribute == 12) *(size_t *)data = RANGE;
    else return INVALID_VALUE;
    return OK;
}
int F(cuTensorMapEncodeTiled)(uint64_t *map, int type, unsigned rank, void *address,
                              const uint64_t *dims, const uint64_t *strides, const uint32_t *box,
                              const uint32_t *element, int a, int b, int c, int d) {
    (void)a; (void)b; (void)c; (void)d;
    if (type != 0 || rank != 2 || dims[0] != 256 || dims[1] != 256 || strides[0] != 256 ||
        box[0] != 16 || box[1] != 16 || element[0] != 1 || element[1] != 1)
        return INVALID_VALUE;
    memset(map, 0, 128);
    map[0] = (uint64_t)address;
    return OK;
}

static void *find(const char *symbol) {
    char name[128];
    snprintf(name, sizeof name, "fake_%s", symbol);
    return dlsym(RTLD_DEFAULT, name);
}
int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                        int *status) {
    (void)version; (void)flags;
    *function = find(symbol);
    if (status) *status = *function ? 0 : 1;
    return *function ? OK : 500;
}
int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
