#include "footprint.h"

#include "checkpoint.h"

#include <elf.h>
#include <sys/auxv.h>
#include <unistd.h>

/* Stack, C library, kernel's rounding: what a run of a program that does nothing has on top of its own pages. Measured on
 * static x86-64, aarch64 and riscv64 binaries. */
enum { PROCESS_BYTES = 98304 };

/* The thread that reads ahead: its stack and what the C library keeps of it. */
enum { READER_BYTES = 24576 };

enum { PIECE_BYTES = 65536 };

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

/* Between the variables of a sanitised build lies what nobody else may read. */
__attribute__((no_sanitize_address)) void footprint_touch_program(void) {
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

uint64_t footprint_target_bytes(const taste_model *model, const taste_program_facts *facts) {
    taste_model_facts model_facts;
    uint64_t bytes = footprint_sample_bytes(model, facts->target);
    if (bytes > 0) return bytes;
    (void)taste_model_describe(model, &model_facts);
    uint64_t logits = footprint_sample_bytes(model, facts->output);
    uint64_t labels = model_facts.classes > 0 ? logits / 4 / model_facts.classes : 0;
    return (labels > 0 ? labels : 1) * sizeof(int32_t);
}

size_t footprint_session(const taste_model *model, const footprint_need *need, taste_session_options *out_options,
                         taste_use *out_uses) {
    taste_program_facts facts;
    uint32_t eval;
    (void)taste_model_program(model, need->program, &facts);
    *out_options = (taste_session_options){.slots = facts.updates ? need->slots : 0, .accumulate = need->accumulate};
    out_uses[0] = (taste_use){need->program, need->batch_size};
    if (!facts.updates || taste_model_find_program(model, "eval", &eval) != TASTE_STATUS_OK) return 1;
    out_uses[1] = (taste_use){eval, need->batch_size};
    return 2;
}

/* Bytes of a row as it stands in a packed file. */
static uint64_t raw_bytes(const taste_model *model, const taste_program_facts *facts) {
    uint64_t x = footprint_sample_bytes(model, facts->input) / 4, y = footprint_target_bytes(model, facts) / 4;
    return x > y ? x : y;
}

taste_status footprint_of(const taste_model *model, const footprint_need *need, footprint *out, taste_error *error) {
    taste_program_facts facts;
    taste_use uses[2];
    taste_session_options options;
    size_t session_bytes;
    taste_status status = taste_model_program(model, need->program, &facts);
    if (status != TASTE_STATUS_OK) return status;
    size_t count = footprint_session(model, need, &options, uses);
    status = taste_session_bytes(model, uses, count, &options, &session_bytes, error);
    if (status != TASTE_STATUS_OK) return status;
    *out = (footprint){.session_bytes = session_bytes};
    out->parameters_bytes = taste_parameters_bytes(model);
    out->pool_bytes = taste_pool_bytes(need->threads);
    out->parameters = reserve(out, out->parameters_bytes);
    out->pool = reserve(out, out->pool_bytes);
    out->session = reserve(out, out->session_bytes);
    for (int i = 0; i < (facts.updates ? 2 : 1); i++) {
        out->x[i] = reserve(out, need->batch_size * footprint_sample_bytes(model, facts.input));
        out->y[i] = reserve(out, need->batch_size * footprint_target_bytes(model, &facts));
        out->raw[i] = reserve(out, raw_bytes(model, &facts));
    }
    out->logits = reserve(out, need->batch_size * footprint_sample_bytes(model, facts.output));
    /* Must hold the header of a checkpoint of this model. */
    uint64_t header = taste_safetensors_header(model, ~0u, options.slots, NULL, 0, NULL) + CHECKPOINT_METADATA_BYTES;
    out->staging_bytes = header > PIECE_BYTES ? header : PIECE_BYTES;
    out->staging = reserve(out, out->staging_bytes);
    out->beside = reserve(out, need->beside_bytes);
    out->block_bytes = round_up(out->block_bytes, page_bytes());
    /* The header of one file at a time is looked at while the block is in use; a checkpoint's is the longest. */
    uint64_t header_bytes = header + sizeof(taste_safetensors);
    out->planned_bytes = out->block_bytes + program_bytes() + PROCESS_BYTES + header_bytes + READER_BYTES;
    return TASTE_STATUS_OK;
}

taste_status footprint_line_of(const taste_model *model, const footprint_need *need, footprint_line *out,
                               taste_error *error) {
    taste_model_facts model_facts;
    taste_program_facts facts, other;
    taste_use uses[2];
    taste_session_options options;
    footprint at_least;
    (void)taste_model_describe(model, &model_facts);
    taste_status status = taste_model_program(model, need->program, &facts);
    if (status != TASTE_STATUS_OK) return status;
    uint32_t least = facts.updates && model_facts.minimum_batch > 1 ? model_facts.minimum_batch : 1;
    footprint_need smallest = *need;
    smallest.batch_size = least;
    status = footprint_of(model, &smallest, &at_least, error);
    if (status != TASTE_STATUS_OK) return status;
    size_t count = footprint_session(model, &smallest, &options, uses);
    (void)taste_model_program(model, uses[count - 1].program, &other);
    uint64_t fixed = facts.arena_fixed_bytes, per_sample = facts.arena_per_sample_bytes;
    if (other.arena_fixed_bytes > fixed) fixed = other.arena_fixed_bytes;
    if (other.arena_per_sample_bytes > per_sample) per_sample = other.arena_per_sample_bytes;
    uint64_t one = facts.arena_fixed_bytes + least * facts.arena_per_sample_bytes;
    uint64_t two = other.arena_fixed_bytes + least * other.arena_per_sample_bytes;
    uint64_t batch = footprint_sample_bytes(model, facts.input) + footprint_target_bytes(model, &facts);
    out->per_sample_bytes =
        per_sample + (facts.updates ? 2 : 1) * batch + footprint_sample_bytes(model, facts.output);
    /* A page covers the rounding of the parts, which differs a little from one batch size to another. */
    out->fixed_bytes = at_least.planned_bytes + page_bytes() + (fixed + least * per_sample - (one > two ? one : two)) -
                       least * out->per_sample_bytes;
    return TASTE_STATUS_OK;
}

uint32_t footprint_largest_batch(const footprint_line *line, uint64_t limit_bytes) {
    if (limit_bytes < line->fixed_bytes + line->per_sample_bytes) return 0;
    uint64_t batch = (limit_bytes - line->fixed_bytes) / line->per_sample_bytes;
    return batch > INT32_MAX ? INT32_MAX : (uint32_t)batch;
}
