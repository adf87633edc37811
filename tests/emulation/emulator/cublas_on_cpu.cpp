// Stand-in for cuBLAS: the calls of chainer_bspmm.cuda.gemm, on the host's memory, in three loops.
// Like the real library it forgets the workspace when the stream changes, and refuses arguments
// that the manual excludes. It also refuses a product without a user's workspace, for which the
// real one allocates. It cannot show faults of precision on a device, of streams, or of captures.
#include <cstddef>

namespace {

constexpr int kSuccess = 0, kNotInitialized = 1, kAllocFailed = 3, kInvalid = 7, kUnsupported = 15;
constexpr int kSingle = 0, kDouble = 1, kHalf = 2;  // cudaDataType_t
int live = 0;

struct Handle {
    void* stream = nullptr;
    void* workspace = nullptr;
    int math_mode = 0;
    bool is_live = true;
};

int leading(int rows) { return rows > 1 ? rows : 1; }  // smallest valid leading dimension

// Compute one product, column by column. In: type of storage; Real: type of the calculation.
template <typename In, typename Real>
void multiply(int trans_a, int trans_b, int m, int n, int k, Real alpha, const In* a, int lda,
              const In* b, int ldb, Real beta, In* c, int ldc) {
    for (int j = 0; j < n; ++j)
        for (int i = 0; i < m; ++i) {
            Real sum = 0;
            for (int l = 0; l < k; ++l)
                sum += Real(a[trans_a ? l + ptrdiff_t(i) * lda : i + ptrdiff_t(l) * lda]) *
                       Real(b[trans_b ? j + ptrdiff_t(l) * ldb : l + ptrdiff_t(j) * ldb]);
            In& y = c[i + ptrdiff_t(j) * ldc];
            y = In(beta == 0 ? alpha * sum : alpha * sum + beta * Real(y));  // 0 * NaN is not read
        }
}

template <typename In, typename Real>
void multiply_all(int trans_a, int trans_b, int m, int n, int k, const void* alpha, const void* a,
                  int lda, long long stride_a, const void* b, int ldb, long long stride_b,
                  const void* beta, void* c, int ldc, long long stride_c, int count) {
    for (int i = 0; i < count; ++i)
        multiply<In, Real>(trans_a, trans_b, m, n, k, *static_cast<const Real*>(alpha),
                           static_cast<const In*>(a) + i * stride_a, lda,
                           static_cast<const In*>(b) + i * stride_b, ldb,
                           *static_cast<const Real*>(beta), static_cast<In*>(c) + i * stride_c,
                           ldc);
}

}  // namespace

extern "C" {

int live_handles() { return live; }
int math_mode(void* handle) { return static_cast<Handle*>(handle)->math_mode; }
void* stream_of(void* handle) { return static_cast<Handle*>(handle)->stream; }

int cublasCreate_v2(void** handle) {
    *handle = new Handle;
    ++live;
    return kSuccess;
}

int cublasDestroy_v2(void* handle) {
    if (!static_cast<Handle*>(handle)->is_live) return kNotInitialized;
    static_cast<Handle*>(handle)->is_live = false;  // kept, so that a second call is noticed
    --live;
    return kSuccess;
}

int cublasSetStream_v2(void* handle, void* stream) {
    static_cast<Handle*>(handle)->stream = stream;
    static_cast<Handle*>(handle)->workspace = nullptr;
    return kSuccess;
}

int cublasSetWorkspace_v2(void* handle, void* workspace, size_t bytes) {
    if (bytes != size_t(32) << 20) return kInvalid;
    static_cast<Handle*>(handle)->workspace = workspace;
    return kSuccess;
}

int cublasSetMathMode(void* handle, int mode) {
    static_cast<Handle*>(handle)->math_mode = mode;
    return kSuccess;
}

int cublasGemmStridedBatchedEx(void* handle, int trans_a, int trans_b, int m, int n, int k,
                               const void* alpha, const void* a, int a_type, int lda,
                               long long stride_a, const void* b, int b_type, int ldb,
                               long long stride_b, const void* beta, void* c, int c_type, int ldc,
                               long long stride_c, int count, int compute, int algorithm) {
    if (!static_cast<Handle*>(handle)->is_live) return kNotInitialized;
    if (!static_cast<Handle*>(handle)->workspace) return kAllocFailed;
    if (m < 0 || n < 0 || k < 0 || count < 0 || trans_a < 0 || trans_a > 1 || trans_b < 0 ||
        trans_b > 1 || lda < leading(trans_a ? k : m) || ldb < leading(trans_b ? n : k) ||
        ldc < leading(m))
        return kInvalid;
    const bool in_double = compute == 70 || compute == 71;
    const bool in_single = compute == 68 || compute == 69 || compute == 77;
    if (a_type != b_type || a_type != c_type || algorithm != -1 ||
        !(a_type == kDouble ? in_double : in_single))
        return kUnsupported;
    auto product = a_type == kDouble   ? multiply_all<double, double>
                   : a_type == kSingle ? multiply_all<float, float>
                   : a_type == kHalf   ? multiply_all<_Float16, float>
                                       : nullptr;
    if (!product) return kUnsupported;
    product(trans_a, trans_b, m, n, k, alpha, a, lda, stride_a, b, ldb, stride_b, beta, c, ldc,
            stride_c, count);
    return kSuccess;
}

// Here a, b and c are arrays of addresses, which the real library reads on the device.
int cublasGemmBatchedEx(void* handle, int trans_a, int trans_b, int m, int n, int k,
                        const void* alpha, const void* const* a, int a_type, int lda,
                        const void* const* b, int b_type, int ldb, const void* beta,
                        void* const* c, int c_type, int ldc, int count, int compute,
                        int algorithm) {
    for (int i = 0; i < count; ++i) {
        const int status = cublasGemmStridedBatchedEx(
            handle, trans_a, trans_b, m, n, k, alpha, a[i], a_type, lda, 0, b[i], b_type, ldb, 0,
            beta, c[i], c_type, ldc, 0, 1, compute, algorithm);
        if (status) return status;
    }
    return kSuccess;
}

int cublasGemmEx(void* handle, int trans_a, int trans_b, int m, int n, int k, const void* alpha,
                 const void* a, int a_type, int lda, const void* b, int b_type, int ldb,
                 const void* beta, void* c, int c_type, int ldc, int compute, int algorithm) {
    return cublasGemmStridedBatchedEx(handle, trans_a, trans_b, m, n, k, alpha, a, a_type, lda, 0,
                                      b, b_type, ldb, 0, beta, c, c_type, ldc, 0, 1, compute,
                                      algorithm);
}
}
