/* safetensors files of parameters and states, read and written through a small buffer. */
#ifndef TASTE_TRAIN_WEIGHTS_H
#define TASTE_TRAIN_WEIGHTS_H

#include "canonical.h"

/* A safetensors file open for reading; its header stays mapped until closed. */
typedef struct tensor_file {
    int file; /* -1: not open */
    const char *path;
    void *mapped;
    uint64_t mapped_bytes;
    taste_safetensors *header; /* at the end of the mapping */
} tensor_file;

taste_status tensor_file_open(const char *path, tensor_file *out, taste_error *error);
void tensor_file_close(tensor_file *file);

/* Gives the header's memory back; the file stays open to be read at known places. */
void tensor_file_forget_header(tensor_file *file);

/* The tensor called `name`; 0: there is none. */
int tensor_file_find(tensor_file *file, const char *name, taste_safetensors_entry *out_entry);

/* Fills a parameter set. Every parameter and state must be in the file with its own type and shape, else INCOMPATIBLE;
 * other tensors of the file are left alone. CORRUPT: not a whole safetensors file. */
taste_status weights_load(const char *path, const taste_model *model, taste_parameters *parameters, void *staging,
                          size_t staging_bytes, taste_error *error);

/* Writes what `c` holds, without slots, whole or not at all. */
taste_status weights_save(const char *path, const canonical *c, uint64_t step, taste_error *error);

/* Writes every parameter's gradient under the parameter's name. */
taste_status weights_save_gradients(const char *path, const taste_model *model, taste_session *session,
                                    taste_error *error);

#endif
