// A CUDA device for a torch that was built without: streams that never wait, and one GPU that is said to be there.
// Its tensors compute nothing by themselves; fake_cuda/__init__.py gives them values.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
struct FakeCudaGuard final : DeviceGuardImplInterface {
  static Device only() { return {DeviceType::CUDA, 0}; }
  static Stream stream() { return Stream(Stream::DEFAULT, only()); }
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return only(); }
  Device exchangeDevice(Device) const override { return only(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(); }
  Stream exchangeStream(Stream) const override { return stream(); }
  void record(void**, const Stream&, DeviceIndex, EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeCudaGuard);
}  // namespace c10::impl

namespace at {
struct FakeCudaHooks : CUDAHooksInterface {
  explicit FakeCudaHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
  void deviceSynchronize(DeviceIndex) const override {}
};
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", FakeCudaHooks)
}  // namespace at
