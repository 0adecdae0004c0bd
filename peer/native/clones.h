#ifndef SOTTOVOCE_CLONES_H
#define SOTTOVOCE_CLONES_H
/* Before a function: compiled once for each width of register, chosen when the module is loaded. */
#if defined(__x86_64__) && defined(__GNUC__) && defined(__GLIBC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#endif
