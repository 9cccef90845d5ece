/* The public header's own text, so that a binding needs no second copy of it: the assembler includes the file. */
#include "taste.h"

__asm__(".pushsection .rodata\n"
        ".globl taste_header_bytes\n"
        ".hidden taste_header_bytes\n"
        "taste_header_bytes:\n"
        ".incbin \"taste.h\"\n"
        ".byte 0\n"
        ".popsection\n");

extern const char taste_header_bytes[] __attribute__((visibility("hidden")));

const char *taste_header_text(void) {
    return taste_header_bytes;
}
