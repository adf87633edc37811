// Stand-in for CUDA's header of this name. A compiler without _Float16 can still compile kernels
// that store float or double, because these never use the type __half.
#pragma once

#ifdef __FLT16_MANT_DIG__
using __half = _Float16;
inline float __half2float(__half value) { return value; }
inline __half __float2half_rn(float value) { return static_cast<__half>(value); }
#else
struct __half { unsigned short bits; };
float __half2float(__half value);
__half __float2half_rn(float value);
#endif
