/* Includes the file KERNELS once for each width of register, with TIER the suffix of its names. */
#define TIER _portable
#include KERNELS
#undef TIER

#ifdef WIDE
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define TIER _v3
#include KERNELS
#undef TIER
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
#define TIER _v4
#include KERNELS
#undef TIER
#pragma GCC pop_options
#endif
