#include "footprint.h"

#include <elf.h>
#include <sys/auxv.h>
#include <unistd.h>

/* Stack, C library, kernel's rounding: what a run of a program that does nothing has on top of its own pages. Measured on
 * static x86-64, aarch64 and riscv64 binaries. */
enum { PROCESS_BYTES = 98304 };

enum { PIECE_BYTES = 65536, METADATA_BYTES = 256 };

static uint64_t round_up(uint64_t bytes, uint64_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

static uint64_t page_bytes(void) {
    return (uint64_t)sysconf(_SC_PAGESIZE);
}

/* Program headers of the running file, and where it was loaded relative to them. */
static const Elf64_Phdr *program_headers(unsigned long *out_count, uint64_t *out_bias) {
    const Elf64_Phdr *headers = (const Elf64_Phdr *)getauxval(AT_PHDR);
    *out_count = headers == NULL ? 0 : getauxval(AT_PHNUM);
    *out_bias = 0;
    for (unsigned long i = 0; i < *out_count; i++) {
        if (headers[i].p_type == PT_PHDR) *out_bias = (uint64_t)(uintptr_t)headers - headers[i].p_vaddr;
    }
    return headers;
}

static uint64_t program_bytes(void) {
    unsigned long count;
    uint64_t bias, bytes = 0, page = page_bytes();
    const Elf64_Phdr *headers = program_headers(&count, &bias);
    for (unsigned long i = 0; i < count; i++) {
        if (headers[i].p_type != PT_LOAD) continue;
        uint64_t first = headers[i].p_vaddr / page * page;
        bytes += round_up(headers[i].p_vaddr + headers[i].p_memsz, page) - first;
    }
    return bytes;
}

void footprint_touch_program(void) {
    unsigned long count;
    uint64_t bias, page = page_bytes();
    const Elf64_Phdr *headers = program_headers(&count, &bias);
    for (unsigned long i = 0; i < count; i++) {
        if (headers[i].p_type != PT_LOAD || !(headers[i].p_flags & PF_R)) continue;
        uint64_t first = bias + headers[i].p_vaddr;
        for (uint64_t at = first; at < first + headers[i].p_filesz; at = at / page * page + page) {
            (void)*(const volatile unsigned char *)(uintptr_t)at;
        }
    }
}

uint64_t footprint_sample_bytes(const taste_model *model, int32_t tensor) {
    taste_tensor_facts facts;
    if (tensor < 0 || taste_model_tensor(model, (uint32_t)tensor, &facts) != TASTE_STATUS_OK) return 0;
    return facts.element_count * 4;
}

static uint64_t reserve(footprint *f, uint64_t bytes) {
    uint64_t at = f->block_bytes;
    f->block_bytes += round_up(bytes, TASTE_ALIGNMENT);
    return at;
}

taste_status footprint_of(const taste_model *model, uint32_t program, uint32_t batch_size, uint32_t threads,
                          int accumulate, footprint *out, taste_error *error) {
    taste_program_facts facts;
    taste_status status = taste_model_program(model, program, &facts);
    if (status != TASTE_STATUS_OK) return status;
    taste_use use = {program, batch_size};
    taste_session_options options = {.slots = (uint32_t)facts.updates, .accumulate = accumulate};
    size_t session_bytes;
    status = taste_session_bytes(model, &use, 1, &options, &session_bytes, error);
    if (status != TASTE_STATUS_OK) return status;
    *out = (footprint){.session_bytes = session_bytes};
    out->parameters_bytes = taste_parameters_bytes(model);
    out->pool_bytes = taste_pool_bytes(threads);
    out->parameters = reserve(out, out->parameters_bytes);
    out->pool = reserve(out, out->pool_bytes);
    out->session = reserve(out, out->session_bytes);
    out->x = reserve(out, batch_size * footprint_sample_bytes(model, facts.input));
    /* Labels are kept for `eval` too, which compares with them. */
    uint64_t target_bytes = footprint_sample_bytes(model, facts.target);
    out->y = reserve(out, batch_size * (target_bytes > 0 ? target_bytes : sizeof(int32_t)));
    out->logits = reserve(out, facts.updates ? 0 : batch_size * footprint_sample_bytes(model, facts.output));
    /* Must hold the header of a weights file of this model. */
    out->staging_bytes = taste_safetensors_header(model, ~0u, NULL, 0, NULL) + METADATA_BYTES;
    if (out->staging_bytes < PIECE_BYTES) out->staging_bytes = PIECE_BYTES;
    out->staging = reserve(out, out->staging_bytes);
    out->block_bytes = round_up(out->block_bytes, page_bytes());
    out->planned_bytes = out->block_bytes + program_bytes() + PROCESS_BYTES;
    return TASTE_STATUS_OK;
}

taste_status footprint_line_of(const taste_model *model, uint32_t program, uint32_t threads, int accumulate,
                               footprint_line *out, taste_error *error) {
    taste_model_facts model_facts;
    taste_program_facts facts;
    footprint at_one;
    (void)taste_model_describe(model, &model_facts);
    taste_status status = taste_model_program(model, program, &facts);
    if (status != TASTE_STATUS_OK) return status;
    uint32_t least = facts.updates && model_facts.minimum_batch > 1 ? model_facts.minimum_batch : 1;
    status = footprint_of(model, program, least, threads, accumulate, &at_one, error);
    if (status != TASTE_STATUS_OK) return status;
    uint64_t target_bytes = footprint_sample_bytes(model, facts.target);
    out->per_sample_bytes = facts.arena_per_sample_bytes + footprint_sample_bytes(model, facts.input) +
                            (target_bytes > 0 ? target_bytes : sizeof(int32_t)) +
                            (facts.updates ? 0 : footprint_sample_bytes(model, facts.output));
    /* A page covers the rounding of the parts, which differs a little from one batch size to another. */
    out->fixed_bytes = at_one.planned_bytes + page_bytes() - least * out->per_sample_bytes;
    return TASTE_STATUS_OK;
}

uint32_t footprint_largest_batch(const footprint_line *line, uint64_t limit_bytes) {
    if (limit_bytes < line->fixed_bytes + line->per_sample_bytes) return 0;
    uint64_t batch = (limit_bytes - line->fixed_bytes) / line->per_sample_bytes;
    return batch > INT32_MAX ? INT32_MAX : (uint32_t)batch;
}
