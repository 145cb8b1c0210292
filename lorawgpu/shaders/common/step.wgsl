// Values of one optimizer step or micro-batch, written by the host (ops/step.py). Bind as var<uniform> step: Step.
struct Step {
    lr: f32,          // learning rate
    inv_targets: f32, // 1 / target tokens of the step, because gradients are sums
    m_scale: f32,     // 1 / (1 - beta1^t)
    v_scale: f32,     // 1 / sqrt(1 - beta2^t)
    key0: u32,        // dropout key of (seed, step, micro-batch)
    key1: u32,
}
