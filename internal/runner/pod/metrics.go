package pod

import (
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fairlead/fairlead/internal/runner/confinement"
	"github.com/fairlead/fairlead/internal/runner/status"
)

// Metrics has the names of kubelet's metrics where kubelet has the same thing, so that
// its dashboards work.
type Metrics struct {
	pods, restarts              prometheus.Counter
	containers, errors          *prometheus.CounterVec
	probes                      *prometheus.CounterVec
	probeDurations              *prometheus.HistogramVec
	phase, running, inContainer *prometheus.Desc
	podCPU, podMemory, forged   *prometheus.Desc
}

// NewMetrics returns Metrics that have counted nothing.
func NewMetrics() *Metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	return &Metrics{
		pods: prometheus.NewCounter(prometheus.CounterOpts{Name: "kubelet_started_pods_total", Help: "Pods whose sandbox was started."}),
		restarts: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "fairlead_runner_container_restarts_total", Help: "Containers that were started again in their Pod.",
		}),
		containers: counter("kubelet_started_containers_total", "Attempts to start a container.", "container_type"),
		errors:     counter("kubelet_started_containers_errors_total", "Attempts to start a container that failed.", "container_type"),
		probes: counter("prober_probe_total", "Probes of a container by result, successful or failed.",
			"probe_type", "result", "container", "pod", "namespace", "pod_uid"),
		probeDurations: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "prober_probe_duration_seconds", Help: "Time that a probe took.", Buckets: prometheus.DefBuckets,
		}, []string{"probe_type", "container", "pod", "namespace"}),
		phase:   prometheus.NewDesc("fairlead_runner_pods", "Pods of this node by phase.", []string{"phase"}, nil),
		running: prometheus.NewDesc("kubelet_running_pods", "Pods of this node in phase Running.", nil, nil),
		podCPU: prometheus.NewDesc("pod_cpu_usage_seconds_total", "Processor time of a Pod's containers that run.",
			[]string{"namespace", "pod"}, nil),
		podMemory: prometheus.NewDesc("pod_memory_working_set_bytes", "Memory of a Pod's containers that the kernel cannot drop at once.",
			[]string{"namespace", "pod"}, nil),
		forged: prometheus.NewDesc("fairlead_pod_forged_packets_total",
			"Packets of a Pod that were dropped since their source was no address of the Pod.", []string{"namespace", "pod"}, nil),
		inContainer: prometheus.NewDesc("kubelet_running_containers", "Containers of this node by state.", []string{"container_state"}, nil),
	}
}

func (m *Metrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{m.pods, m.restarts, m.containers, m.errors, m.probes, m.probeDurations}
}

// containerType is the label of a container.
func (c *container) containerType() string {
	if c.Role != status.Main {
		return "init_container"
	}
	return "container"
}

// started counts an attempt to start a container; attempt is 0 for the first.
func (m *Metrics) started(kind string, attempt int, failed bool) {
	m.containers.WithLabelValues(kind).Inc()
	if attempt > 0 {
		m.restarts.Inc()
	}
	if failed {
		m.errors.WithLabelValues(kind).Inc()
	}
}

// Probed counts a probe.
func (m *Metrics) Probed(pod *corev1.Pod, container, kind string, took time.Duration, err error) {
	result := "successful"
	if err != nil {
		result = "failed"
	}
	m.probes.WithLabelValues(kind, result, container, pod.Name, pod.Namespace, string(pod.UID)).Inc()
	m.probeDurations.WithLabelValues(kind, container, pod.Name, pod.Namespace).Observe(took.Seconds())
}

// forget drops the series of a Pod that is gone.
func (m *Metrics) forget(namespace, name, uid string) {
	m.probes.DeletePartialMatch(prometheus.Labels{"pod_uid": uid})
	m.probeDurations.DeletePartialMatch(prometheus.Labels{"namespace": namespace, "pod": name})
}

func (m *Metrics) describe(out chan<- *prometheus.Desc) {
	for _, c := range m.collectors() {
		c.Describe(out)
	}
	out <- m.phase
	out <- m.running
	out <- m.inContainer
	out <- m.podCPU
	out <- m.podMemory
	out <- m.forged
}

// collectForged adds the Pods of forged, by NAMESPACE/NAME.
func (m *Metrics) collectForged(out chan<- prometheus.Metric, forged map[string]uint64) {
	for pod, n := range forged {
		namespace, name, _ := strings.Cut(pod, "/")
		out <- prometheus.MustNewConstMetric(m.forged, prometheus.CounterValue, float64(n), namespace, name)
	}
}

func (m *Metrics) collect(out chan<- prometheus.Metric, pods []*Snapshot, groups *confinement.Groups) {
	for _, c := range m.collectors() {
		c.Collect(out)
	}
	phases := map[corev1.PodPhase]int{corev1.PodPending: 0, corev1.PodRunning: 0, corev1.PodSucceeded: 0, corev1.PodFailed: 0}
	states := map[string]int{"running": 0, "exited": 0}
	for _, s := range pods {
		if s.Phase != "" {
			phases[s.Phase]++
		}
		if groups.Err == nil && s.Phase == corev1.PodRunning {
			u := groups.Containers(types.UID(s.UID)).Usage()
			out <- prometheus.MustNewConstMetric(m.podCPU, prometheus.CounterValue, u.CPU.Seconds(), s.Namespace, s.Name)
			out <- prometheus.MustNewConstMetric(m.podMemory, prometheus.GaugeValue, float64(u.WorkingSet), s.Namespace, s.Name)
		}
		for _, c := range s.Containers {
			switch {
			case c.Running:
				states["running"]++
			case c.Attempt >= 0:
				states["exited"]++
			}
		}
	}
	gauge := func(d *prometheus.Desc, n int, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(n), labels...)
	}
	for phase, n := range phases {
		gauge(m.phase, n, string(phase))
	}
	gauge(m.running, phases[corev1.PodRunning])
	for state, n := range states {
		gauge(m.inContainer, n, state)
	}
}
