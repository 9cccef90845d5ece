/* What compiled kernels expect of their surroundings: the parts of DLPack and TVM's C ABI that they use, declared here so that
 * no TVM header is needed on the board. Sources: dlpack.h (1.x), tvm/ffi/c_api.h, tvm/runtime/c_backend_api.h of TVM 0.27. */
#ifndef TASTE_TVM_ABI_H
#define TASTE_TVM_ABI_H

#include <stdint.h>

enum { TASTE_DL_CPU = 1, TASTE_DL_INT = 0, TASTE_DL_UINT = 1, TASTE_DL_FLOAT = 2, TASTE_FFI_DL_TENSOR = 7 };

typedef struct taste_dl_device {
    int32_t type;
    int32_t id;
} taste_dl_device;

typedef struct taste_dl_type {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} taste_dl_type;

typedef struct taste_dl_tensor {
    void *data;
    taste_dl_device device;
    int32_t ndim;
    taste_dl_type dtype;
    int64_t *shape;
    int64_t *strides; /* NULL: row-major and compact */
    uint64_t byte_offset;
} taste_dl_tensor;

typedef struct taste_ffi_any {
    int32_t type_index;
    uint32_t zero_padding;
    union {
        int64_t as_int;
        double as_float;
        void *as_pointer;
    } value;
} taste_ffi_any;

typedef struct taste_parallel_group {
    void *sync_handle;
    int32_t task_count;
} taste_parallel_group;

/* One task of a parallel loop: does the task_id-th of group->task_count equal parts. 0 is success. */
typedef int (*taste_task)(int task_id, taste_parallel_group *group, void *closure);

/* The outside symbols of a kernel object. The first three are variables that hold functions. */
extern int (*__TVMBackendParallelLaunch)(taste_task task, void *closure, int task_count);
extern void *(*__TVMBackendAllocWorkspace)(int device_type, int device_id, uint64_t size_bytes, int type_code,
                                           int type_bits);
extern int (*__TVMBackendFreeWorkspace)(int device_type, int device_id, void *workspace);
void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t part_count);

_Static_assert(sizeof(taste_dl_tensor) == 48, "DLTensor is 48 bytes");
_Static_assert(sizeof(taste_ffi_any) == 16, "TVMFFIAny is 16 bytes");

#endif
