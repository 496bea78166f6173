/* Operations of torch's own, so that a traced pass gets there without Python, through the interface that torch keeps
 * stable for C (torch/csrc/inductor/aoti_torch/c/shim.h). A kernel owns the tensors that it is given. What it cannot
 * read it answers with a tensor of no size: whoever puts it in a trace compares what the trace says. */
#include "bytes.h"
#include "singly.h"
#if defined(__GNUC__) && !defined(_WIN32)
#include <dlfcn.h>

#define BESIDE 4   /* vectors that torch adds side by side, */
#define LEVELS 4   /* in so many levels, */
#define SMALLEST 4 /* each of two to this power, at least, of the one below */

typedef uint64_t Value; /* of a kernel's stack */
typedef void *Handle;
typedef void Kernel(Value *stack, uint64_t inputs, uint64_t outputs);

#define NEEDED(each)                                                                              \
    each(aoti_torch_get_data_ptr, (Handle, void **)) each(aoti_torch_get_dim, (Handle, int64_t *)) \
    each(aoti_torch_get_sizes, (Handle, int64_t **)) each(aoti_torch_get_strides, (Handle, int64_t **)) \
    each(aoti_torch_get_dtype, (Handle, int32_t *)) each(aoti_torch_clone, (Handle, Handle *)) \
    each(aoti_torch_delete_tensor_object, (Handle)) each(aoti_torch_dtype_int32, (void)) \
    each(aoti_torch_empty_strided, (int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, Handle *)) \
    each(aoti_torch_dtype_bfloat16, (void)) each(aoti_torch_dtype_float16, (void)) \
    each(aoti_torch_dtype_float32, (void)) \
    each(aoti_torch_library_init_impl, (const char *, const char *, const char *, uint32_t, void **)) \
    each(aoti_torch_library_impl, (void *, const char *, Kernel *))
#define DECLARED(name, arguments) static int32_t(*name) arguments;
#define FOUND(name, arguments) && (*(void **)&name = dlsym(library, #name)) != NULL
NEEDED(DECLARED)

/* A tensor of so many axes, 0 = any, and of float32, bfloat16 or float16 or, if `whole`, of int32. */
static int
view(Value given, View *of, int64_t axes, int whole)
{
    Handle from = (Handle)given;
    int32_t dtype;
    int failed = aoti_torch_get_dim(from, &of->axes) | aoti_torch_get_sizes(from, &of->sizes) |
                 aoti_torch_get_strides(from, &of->strides) | aoti_torch_get_dtype(from, &dtype) |
                 aoti_torch_get_data_ptr(from, (void **)&of->data);
    const int half = dtype == aoti_torch_dtype_float16() && sizeof(Half) == 2;
    of->kind = half ? FLOAT16 : dtype == aoti_torch_dtype_bfloat16() ? BFLOAT16 : SINGLE;
    failed |= of->kind == SINGLE && dtype != (whole ? aoti_torch_dtype_int32() : aoti_torch_dtype_float32());
    if (failed || of->axes < 1 || (axes && of->axes != axes))
        return 0;
    of->last = of->sizes[of->axes - 1];
    return (of->last < 2 || of->strides[of->axes - 1] == 1) && (of->kind == SINGLE) >= whole;
}

/* Give inputs back, and put the output on the stack: `made`, or if that has failed, or is none, a tensor of no size. */
static void
answer(Value *stack, int inputs, Handle made, int failed)
{
    int64_t size = 0, stride = 1;
    for (int at = 0; at < inputs; at++)
        aoti_torch_delete_tensor_object((Handle)stack[at]);
    if (failed && made != NULL)
        aoti_torch_delete_tensor_object(made);
    if (failed || made == NULL)
        aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_float32(), 0, 0, &made);
    stack[0] = (Value)made;
}

static inline float
number_at(const char *from, int64_t at, int is_wide)
{
    return is_wide ? ((const float *)from)[at] : widened(((const uint16_t *)from)[at]);
}

/* What a number is once its tensor holds it. */
static inline float
held(float value, int is_wide)
{
    return is_wide ? value : widened(narrowed(value));
}

static inline void
put_number(char *to, int64_t at, float value, int is_wide)
{
    if (is_wide)
        ((float *)to)[at] = value;
    else
        ((uint16_t *)to)[at] = narrowed(value);
}

/* A line's sum in the order of torch's kernel: vectors of so many lanes, some side by side, in a cascade of levels. */
static inline __attribute__((always_inline)) float
sum_in(const float *line, int64_t size, const int lanes)
{
    float sums[LEVELS][BESIDE * 16] = {{0}}, *all = sums[0], total = 0.0f;
    const int wide = BESIDE * lanes;
    int64_t count = size / wide, at = 0, power = 0;
    while ((int64_t)1 << power < count)
        power++;
    power = Py_MAX(SMALLEST, power / LEVELS);
    while (at < count) {
        for (int64_t stop = Py_MIN(count, at + ((int64_t)1 << power)); at < stop; at++)
            for (int lane = 0; lane < wide; lane++)
                all[lane] += line[at * wide + lane];
        for (int level = 1; level < LEVELS && at % ((int64_t)1 << level * power) == 0; level++)
            for (int lane = 0; lane < wide; lane++) {
                sums[level][lane] += sums[level - 1][lane];
                sums[level - 1][lane] = 0.0f;
            }
    }
    for (int level = 1; level < LEVELS; level++)
        for (int lane = 0; lane < wide; lane++)
            all[lane] += sums[level][lane];
    for (at = count * wide; at + lanes <= size; at += lanes)
        for (int lane = 0; lane < lanes; lane++)
            all[lane] += line[at + lane];
    for (int lane = lanes; lane < wide; lane++)
        all[lane % lanes] += all[lane];
    for (; at < size; at++)
        total += line[at];
    for (int lane = 0; lane < lanes; lane++)
        total += all[lane];
    return total;
}

WIDE static void
norm_line(char *line, const View *weight, float epsilon, int64_t lanes, int64_t less, float *room)
{
    const int is_wide = weight->kind == SINGLE;
    const int64_t size = weight->last;
    float *squares = room + size;
    for (int64_t at = 0; at < size; at++) {
        room[at] = number_at(line, at, is_wide);
        squares[at] = room[at] * room[at];
    }
    float sum = lanes == 4   ? sum_in(squares, size, 4)
                : lanes == 8 ? sum_in(squares, size, 8)
                             : sum_in(squares, size, 16);
    float scale = 1.0f / sqrtf(sum / (float)size + epsilon);
    for (int64_t at = 0; at < size; at++) {
        float factor = number_at(weight->data, at, is_wide), scaled = room[at] * scale;
        put_number(line, at, less ? scaled * (1.0f + factor) : factor * held(scaled, is_wide), is_wide);
    }
}

/* normed(rows, weight, epsilon, lanes, less): rows, all side by side, over the root of the mean of their squares, times
 * the weight, which may be kept less 1. */
static void
normed(Value *stack, uint64_t inputs, uint64_t outputs)
{
    View rows, weight, made;
    Handle copy = NULL;
    double epsilon;
    float *room = NULL;
    memcpy(&epsilon, stack + 2, sizeof(epsilon));
    int sound = view(stack[0], &rows, 0, 0) & view(stack[1], &weight, 1, 0);
    const int64_t numbers = sound ? dense_numbers(&rows) : -1;
    if (numbers > 0 && rows.kind == weight.kind && rows.kind != FLOAT16 && weight.last == rows.last)
        room = malloc(2 * rows.last * sizeof(float));
    if (room != NULL && !aoti_torch_clone((Handle)stack[0], &copy) && view((Value)copy, &made, 0, 0))
        for (int64_t at = 0; at < numbers; at += rows.last)
            norm_line(made.data + at * (rows.kind == SINGLE ? 4 : 2), &weight, (float)epsilon, (int64_t)stack[3],
                      (int64_t)stack[4], room);
    free(room);
    answer(stack, 2, copy, 0);
}

WIDE static void
rotate_line(const char *line, const char *cosines, const char *sines, char *into, int64_t size, int is_wide)
{
    float wide[CHANNELS], across[CHANNELS];
    for (int64_t at = 0; at < size; at++)
        wide[at] = number_at(line, at, is_wide);
    for (int64_t at = 0; at < size / 2; at++) {
        across[at] = -wide[at + size / 2];
        across[at + size / 2] = wide[at];
    }
    for (int64_t at = 0; at < size; at++) {
        float turned = held(across[at] * number_at(sines, at, is_wide), is_wide);
        put_number(into, at, held(wide[at] * number_at(cosines, at, is_wide), is_wide) + turned, is_wide);
    }
}

/* rotated(states, cosines, sines): rotary positions of states [batch, head, node, channel], by angles [batch or 1, 1,
 * node, channel]. */
static void
rotated(Value *stack, uint64_t inputs, uint64_t outputs)
{
    View each[3], made;
    Handle copy = NULL;
    int sound = view(stack[0], each, 4, 0) & view(stack[1], each + 1, 4, 0) & view(stack[2], each + 2, 4, 0) &&
                each->last <= CHANNELS && each->kind != FLOAT16;
    for (int at = 1; sound && at < 3; at++)
        sound = each[at].kind == each->kind && each[at].last == each->last && each->last % 2 == 0 &&
                each[at].sizes[1] == 1 && each[at].sizes[2] == each->sizes[2] &&
                (each[at].sizes[0] == 1 || each[at].sizes[0] == each->sizes[0]);
    if (sound && !aoti_torch_clone((Handle)stack[0], &copy) && view((Value)copy, &made, 4, 0))
        for (int64_t row = 0; row < each->sizes[0]; row++)
            for (int64_t node = 0; node < each->sizes[2]; node++)
                for (int64_t head = 0; head < each->sizes[1]; head++)
                    rotate_line(line_in(each, row, head, node), line_in(each + 1, row, 0, node),
                                line_in(each + 2, row, 0, node), line_in(&made, row, head, node), each->last,
                                each->kind == SINGLE);
    answer(stack, 3, copy, 0);
}

/* attended(queries, keys, values, mask, sequences, scale, windowed): see `Attention`. */
static void
attended(Value *stack, uint64_t inputs, uint64_t outputs)
{
    View each[6];
    Handle copy = NULL;
    double scale;
    int sound = 1;
    memcpy(&scale, stack + 5, sizeof(scale));
    for (int at = 0; at < 5; at++)
        sound &= view(stack[at], each + at, at == 4 ? 2 : 4, at == 4) && (at == 4 || each[at].kind == each->kind);
    Attention of = {.tensors = each, .scale = (float)scale, .kind = each->kind};
    sound = sound && each->kind != SINGLE && is_sound(&of) && !aoti_torch_clone((Handle)stack[0], &copy) &&
            view((Value)copy, each + 5, 4, 0) && !attend(&of, (int)stack[6]);
    answer(stack, 5, copy, !sound);
}

/* multiplied(rows, weight, bias, chain), multiplied_bytes(rows, weight, scales, bias), in the rows' dtype. */
static void
layer(Value *stack, int tensors, int64_t chain, int fits(const View *, int64_t *),
      int product(const View *, int64_t, View *))
{
    View each[4], made;
    Handle found = NULL;
    int32_t dtype;
    int64_t sizes[2] = {0, 0};
    int sound = !aoti_torch_get_dtype((Handle)stack[0], &dtype) && chain > 0 && chain % 2 == 0;
    for (int at = 0; at < tensors; at++)
        sound &= view(stack[at], each + at, 0, at == 1 && tensors == 4);
    sound = sound && fits(each, sizes);
    const int64_t strides[2] = {sizes[1], 1};
    sound = sound && !aoti_torch_empty_strided(2, sizes, strides, dtype, 0, 0, &found) &&
            view((Value)found, &made, 2, 0) && !product(each, chain, &made);
    answer(stack, tensors, found, !sound);
}

#define LAYER(name, ...) \
    static void name(Value *stack, uint64_t inputs, uint64_t outputs) { layer(stack, __VA_ARGS__); }
LAYER(multiplied, 3, (int64_t)stack[3], fits_layer, multiply)
LAYER(multiplied_bytes, 4, 2, fits_bytes, multiply_bytes)

#endif

/* operations(library): give torch, whose library that is, the kernels of its operations; once. */
PyObject *
operations(PyObject *module, PyObject *args)
{
#ifdef NEEDED
    static void *kernels;
    const char *path;
    if (!PyArg_ParseTuple(args, "s:operations", &path))
        return NULL;
    void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    int found = library != NULL NEEDED(FOUND);
    if (kernels != NULL ||
        (found && !aoti_torch_library_init_impl("lookahead", "CPU", __FILE__, __LINE__, &kernels) &&
         !aoti_torch_library_impl(kernels, "normed", normed) && !aoti_torch_library_impl(kernels, "rotated", rotated) &&
         !aoti_torch_library_impl(kernels, "attended", attended) &&
         !aoti_torch_library_impl(kernels, "multiplied", multiplied) &&
         !aoti_torch_library_impl(kernels, "multiplied_bytes", multiplied_bytes)))
        return Py_NewRef(Py_None);
#endif
    PyErr_SetString(PyExc_RuntimeError, "torch takes no operations in C");
    return NULL;
}
