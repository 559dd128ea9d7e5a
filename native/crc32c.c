/* CRC-32C: by the processor's instruction if it has one, else by tables. */

#include "native.h"

#include <string.h>

#define POLYNOMIAL 0x82F63B78u
/* The instruction takes three cycles, and one can begin in each cycle: so three blocks of
 * this size are read at a time. */
#define BLOCK_BYTES 512

static uint32_t tables[8][256];

static uint32_t crc32c_by_table(uint32_t crc, const unsigned char *at,
                                const unsigned char *end) {
    for (; end - at >= 8; at += 8) {
        crc ^= (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 |
               (uint32_t)at[3] << 24;
        crc = tables[7][crc & 255] ^ tables[6][crc >> 8 & 255] ^
              tables[5][crc >> 16 & 255] ^ tables[4][crc >> 24] ^ tables[3][at[4]] ^
              tables[2][at[5]] ^ tables[1][at[6]] ^ tables[0][at[7]];
    }
    for (; at < end; at++) crc = crc >> 8 ^ tables[0][(crc ^ *at) & 255];
    return crc;
}

/* The instruction in assembly: compilers differ in what they call it and in which functions
 * they allow it. */
#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>

#define WITH_INSTRUCTION
#define BY_EIGHT(crc, word) __asm__("crc32q %1, %0" : "+r"(crc) : "r"(word))
#define BY_ONE(crc, byte) __asm__("crc32b %1, %k0" : "+r"(crc) : "r"(byte))

static int find_instruction(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_SSE4_2;
}
#elif defined(__aarch64__) && (defined(__linux__) || defined(__APPLE__))
#define WITH_INSTRUCTION
#define ASSEMBLY(line, crc, operand)                                                     \
    __asm__(".arch_extension crc\n\t" line : "+r"(crc) : "r"(operand))
#define BY_EIGHT(crc, word) ASSEMBLY("crc32cx %w0, %w0, %x1", crc, word)
#define BY_ONE(crc, byte) ASSEMBLY("crc32cb %w0, %w0, %w1", crc, (uint32_t)(byte))

#ifdef __APPLE__
static int find_instruction(void) {
    return 1;
}
#else
#include <sys/auxv.h>

static int find_instruction(void) {
    return (getauxval(AT_HWCAP) & 1 << 7) != 0; /* HWCAP_CRC32 */
}
#endif
#endif

#ifdef WITH_INSTRUCTION
static int has_instruction;

/* By each byte of a remainder: the remainder after one more block of zeros. */
static uint32_t behind_block[4][256];

static void init_blocks(void) {
    static const unsigned char zeros[BLOCK_BYTES];
    for (int byte = 0; byte < 4; byte++)
        for (uint32_t i = 0; i < 256; i++)
            behind_block[byte][i] =
                crc32c_by_table(i << 8 * byte, zeros, zeros + BLOCK_BYTES);
}

static uint32_t skip_block(uint64_t crc) {
    return behind_block[0][crc & 255] ^ behind_block[1][crc >> 8 & 255] ^
           behind_block[2][crc >> 16 & 255] ^ behind_block[3][crc >> 24 & 255];
}

static uint64_t eight_bytes(const unsigned char *at) {
    uint64_t found;
    memcpy(&found, at, sizeof found);
    return found;
}

static uint32_t crc32c_by_instruction(uint32_t crc, const unsigned char *at,
                                      const unsigned char *end) {
    uint64_t first = crc;
    for (; end - at >= 3 * BLOCK_BYTES; at += 2 * BLOCK_BYTES) {
        uint64_t second = 0, third = 0;
        for (const unsigned char *stop = at + BLOCK_BYTES; at < stop; at += 8) {
            BY_EIGHT(first, eight_bytes(at));
            BY_EIGHT(second, eight_bytes(at + BLOCK_BYTES));
            BY_EIGHT(third, eight_bytes(at + 2 * BLOCK_BYTES));
        }
        first = skip_block(skip_block(first) ^ second) ^ third;
    }
    for (; end - at >= 8; at += 8) BY_EIGHT(first, eight_bytes(at));
    for (; at < end; at++) BY_ONE(first, *at);
    return (uint32_t)first;
}
#endif

void init_crc32c(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        tables[0][i] = crc;
    }
    for (int t = 1; t < 8; t++)
        for (int i = 0; i < 256; i++)
            tables[t][i] = tables[t - 1][i] >> 8 ^ tables[0][tables[t - 1][i] & 255];
#ifdef WITH_INSTRUCTION
    init_blocks();
    has_instruction = find_instruction();
#endif
}

uint32_t crc32c(const unsigned char *at, const unsigned char *end) {
#ifdef WITH_INSTRUCTION
    if (has_instruction) return crc32c_by_instruction(0xFFFFFFFFu, at, end) ^ 0xFFFFFFFFu;
#endif
    return crc32c_by_table(0xFFFFFFFFu, at, end) ^ 0xFFFFFFFFu;
}
