package pod

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// Defaults of Kubernetes for what a Pod leaves out.
const (
	graceSeconds    = int64(corev1.DefaultTerminationGracePeriodSeconds)
	fileMode        = int32(0o644)
	probeTimeout    = 1
	probePeriod     = 10
	probeSuccess    = 1
	probeFailure    = 3
	tokenExpiration = int64(3600)
)

// setDefaults fills in what p leaves out. It runs on every object that is
// decoded, so a second run must change nothing.
func setDefaults(p *corev1.Pod) {
	SetTemplateDefaults(&p.Spec)
	if p.Spec.EnableServiceLinks == nil {
		p.Spec.EnableServiceLinks = ptr.To(corev1.DefaultEnableServiceLinks)
	}
	for i := range p.Spec.InitContainers {
		setRunDefaults(&p.Spec.InitContainers[i], p.Spec.HostNetwork)
	}
	for i := range p.Spec.Containers {
		setRunDefaults(&p.Spec.Containers[i], p.Spec.HostNetwork)
	}
	setStatusDefaults(&p.Status)
}

// SetTemplateDefaults fills in what the spec of a template leaves out: less than for a
// Pod, which gets the rest when it is created from it.
func SetTemplateDefaults(s *corev1.PodSpec) {
	set(&s.RestartPolicy, corev1.RestartPolicyAlways)
	set(&s.DNSPolicy, corev1.DNSClusterFirst)
	set(&s.SchedulerName, corev1.DefaultSchedulerName)
	if s.SecurityContext == nil {
		s.SecurityContext = &corev1.PodSecurityContext{}
	}
	switch g := s.TerminationGracePeriodSeconds; {
	case g == nil:
		s.TerminationGracePeriodSeconds = ptr.To(graceSeconds)
	case *g < 0: // as from a client that means the shortest
		s.TerminationGracePeriodSeconds = ptr.To(int64(1))
	}
	// Before 1.1 the field was called serviceAccount; both must agree.
	if s.ServiceAccountName == "" {
		s.ServiceAccountName = s.DeprecatedServiceAccount
	}
	s.DeprecatedServiceAccount = s.ServiceAccountName
	for i := range s.InitContainers {
		setContainerDefaults(&s.InitContainers[i])
	}
	for i := range s.Containers {
		setContainerDefaults(&s.Containers[i])
	}
	for i := range s.Volumes {
		setVolumeDefaults(&s.Volumes[i])
	}
}

func setContainerDefaults(c *corev1.Container) {
	if c.ImagePullPolicy == "" {
		c.ImagePullPolicy = pullPolicy(c.Image)
	}
	set(&c.TerminationMessagePath, corev1.TerminationMessagePathDefault)
	set(&c.TerminationMessagePolicy, corev1.TerminationMessageReadFile)
	for i := range c.Ports {
		set(&c.Ports[i].Protocol, corev1.ProtocolTCP)
	}
	for i := range c.Env {
		if v := c.Env[i].ValueFrom; v != nil && v.FieldRef != nil {
			set(&v.FieldRef.APIVersion, "v1")
		}
	}
	for _, p := range []*corev1.Probe{c.LivenessProbe, c.ReadinessProbe, c.StartupProbe} {
		setProbeDefaults(p)
	}
	if c.Lifecycle != nil {
		for _, h := range []*corev1.LifecycleHandler{c.Lifecycle.PostStart, c.Lifecycle.PreStop} {
			if h != nil {
				setHTTPDefaults(h.HTTPGet)
			}
		}
	}
}

// setRunDefaults fills in what a container of a template may leave out and one of a Pod
// has.
func setRunDefaults(c *corev1.Container, hostNetwork bool) {
	for i := range c.Ports {
		if p := &c.Ports[i]; hostNetwork && p.HostPort == 0 {
			p.HostPort = p.ContainerPort
		}
	}
	// A limit is also the request, unless the request is set.
	for name, q := range c.Resources.Limits {
		if _, ok := c.Resources.Requests[name]; !ok {
			if c.Resources.Requests == nil {
				c.Resources.Requests = corev1.ResourceList{}
			}
			c.Resources.Requests[name] = q.DeepCopy()
		}
	}
}

// pullPolicy is Always for images without a tag or with the tag "latest".
func pullPolicy(image string) corev1.PullPolicy {
	if strings.Contains(image, "@") {
		return corev1.PullIfNotPresent
	}
	if i := strings.LastIndexByte(image, ':'); i > strings.LastIndexByte(image, '/') && image[i+1:] != "latest" {
		return corev1.PullIfNotPresent
	}
	return corev1.PullAlways
}

func setProbeDefaults(p *corev1.Probe) {
	if p == nil {
		return
	}
	set(&p.TimeoutSeconds, probeTimeout)
	set(&p.PeriodSeconds, probePeriod)
	set(&p.SuccessThreshold, probeSuccess)
	set(&p.FailureThreshold, probeFailure)
	setHTTPDefaults(p.HTTPGet)
	if p.GRPC != nil && p.GRPC.Service == nil {
		p.GRPC.Service = ptr.To("")
	}
}

func setHTTPDefaults(h *corev1.HTTPGetAction) {
	if h == nil {
		return
	}
	set(&h.Path, "/")
	set(&h.Scheme, corev1.URISchemeHTTP)
}

func setVolumeDefaults(v *corev1.Volume) {
	s := &v.VolumeSource
	switch {
	case *s == corev1.VolumeSource{}:
		s.EmptyDir = &corev1.EmptyDirVolumeSource{}
	case s.HostPath != nil:
		if s.HostPath.Type == nil {
			s.HostPath.Type = ptr.To(corev1.HostPathUnset)
		}
	case s.Secret != nil:
		setMode(&s.Secret.DefaultMode)
	case s.ConfigMap != nil:
		setMode(&s.ConfigMap.DefaultMode)
	case s.DownwardAPI != nil:
		setMode(&s.DownwardAPI.DefaultMode)
		setFileDefaults(s.DownwardAPI.Items)
	case s.Projected != nil:
		setMode(&s.Projected.DefaultMode)
		for i := range s.Projected.Sources {
			src := &s.Projected.Sources[i]
			if src.DownwardAPI != nil {
				setFileDefaults(src.DownwardAPI.Items)
			}
			if t := src.ServiceAccountToken; t != nil && t.ExpirationSeconds == nil {
				t.ExpirationSeconds = ptr.To(tokenExpiration)
			}
		}
	}
}

func setFileDefaults(files []corev1.DownwardAPIVolumeFile) {
	for i := range files {
		if r := files[i].FieldRef; r != nil {
			set(&r.APIVersion, "v1")
		}
	}
}

// setStatusDefaults makes the old single address of the Pod and the list agree. A
// client that knows only the old field writes that one, so it wins. Kubernetes does
// not do this for the addresses of the host.
func setStatusDefaults(s *corev1.PodStatus) {
	switch {
	case s.PodIP != "" && (len(s.PodIPs) == 0 || s.PodIPs[0].IP != s.PodIP):
		s.PodIPs = []corev1.PodIP{{IP: s.PodIP}}
	case s.PodIP == "" && len(s.PodIPs) > 0:
		s.PodIP = s.PodIPs[0].IP
	}
}

// set gives *field the value when it has none.
func set[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

func setMode(m **int32) {
	if *m == nil {
		*m = ptr.To(fileMode)
	}
}
