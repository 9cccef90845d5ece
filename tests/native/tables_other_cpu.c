/* The test model for a CPU that does not exist: everything but the name of a feature is the same. */
#define TABLE_FEATURES "sve9"
#include "tables_mlp.c"
