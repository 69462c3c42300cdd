package pod

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	unversioned "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	netutils "k8s.io/utils/net"

	"github.com/fairlead/fairlead/internal/podspec"
	"github.com/fairlead/fairlead/internal/registration"
	"github.com/fairlead/fairlead/internal/registry/store"
	"github.com/fairlead/fairlead/internal/svc"
)

func validate(p *corev1.Pod) field.ErrorList {
	errs := store.ValidateMeta(&p.ObjectMeta, true, validation.NameIsDNSSubdomain)
	errs = append(errs, validateSpec(&p.Spec, field.NewPath("spec"))...)
	errs = append(errs, validatePrograms(p.Annotations, field.NewPath("metadata", "annotations"))...)
	return append(errs, registration.Validate(p)...)
}

func validatePrograms(annotations map[string]string, path *field.Path) field.ErrorList {
	value := annotations[svc.ProgramsAnnotation]
	if _, err := podspec.ParsePrograms(value); err != nil {
		return field.ErrorList{field.Invalid(path.Key(svc.ProgramsAnnotation), value, err.Error())}
	}
	return nil
}

// ValidateTemplate checks a template for Pods.
func ValidateTemplate(t *corev1.PodTemplateSpec, path *field.Path) field.ErrorList {
	errs := unversioned.ValidateLabels(t.Labels, path.Child("labels"))
	errs = append(errs, validation.ValidateAnnotations(t.Annotations, path.Child("annotations"))...)
	errs = append(errs, validatePrograms(t.Annotations, path.Child("metadata", "annotations"))...)
	return append(errs, validateSpec(&t.Spec, path.Child("spec"))...)
}

func validateSpec(s *corev1.PodSpec, path *field.Path) field.ErrorList {
	volumes, errs := validateVolumes(s.Volumes, path.Child("volumes"))
	errs = append(errs, validateContainers(s, volumes, path)...)
	errs = append(errs, oneOf(path.Child("restartPolicy"), s.RestartPolicy, corev1.RestartPolicyAlways, corev1.RestartPolicyOnFailure,
		corev1.RestartPolicyNever)...)
	errs = append(errs, validateDNS(s, path)...)
	if s.TerminationGracePeriodSeconds == nil {
		errs = append(errs, field.Required(path.Child("terminationGracePeriodSeconds"), ""))
	}
	if d := s.ActiveDeadlineSeconds; d != nil && (*d < 1 || *d > math.MaxInt32) {
		errs = append(errs, field.Invalid(path.Child("activeDeadlineSeconds"), *d, utilvalidation.InclusiveRangeError(1, math.MaxInt32)))
	}
	errs = append(errs, unversioned.ValidateLabels(s.NodeSelector, path.Child("nodeSelector"))...)
	if s.NodeName != "" {
		errs = append(errs, store.Invalids(path.Child("nodeName"), s.NodeName, validation.NameIsDNSSubdomain(s.NodeName, false))...)
	}
	if s.ServiceAccountName != "" {
		errs = append(errs, store.Invalids(path.Child("serviceAccountName"), s.ServiceAccountName,
			validation.ValidateServiceAccountName(s.ServiceAccountName, false))...)
	}
	if s.Hostname != "" {
		errs = append(errs, store.Invalids(path.Child("hostname"), s.Hostname, utilvalidation.IsDNS1123Label(s.Hostname))...)
	}
	if s.Subdomain != "" {
		errs = append(errs, store.Invalids(path.Child("subdomain"), s.Subdomain, utilvalidation.IsDNS1123Label(s.Subdomain))...)
	}
	for i, a := range s.HostAliases {
		p := path.Child("hostAliases").Index(i)
		errs = append(errs, validateIP(p.Child("ip"), a.IP)...)
		for j, h := range a.Hostnames {
			errs = append(errs, store.Invalids(p.Child("hostnames").Index(j), h, utilvalidation.IsDNS1123Subdomain(h))...)
		}
	}
	for i, g := range s.ReadinessGates {
		errs = append(errs, store.Invalids(path.Child("readinessGates").Index(i).Child("conditionType"), string(g.ConditionType),
			utilvalidation.IsQualifiedName(string(g.ConditionType)))...)
	}
	errs = append(errs, validateAffinity(s.Affinity, path.Child("affinity"))...)
	errs = append(errs, validateSpread(s.TopologySpreadConstraints, path.Child("topologySpreadConstraints"))...)
	return append(errs, validateTolerations(s.Tolerations, path.Child("tolerations"))...)
}

func validateDNS(s *corev1.PodSpec, path *field.Path) field.ErrorList {
	errs := oneOf(path.Child("dnsPolicy"), s.DNSPolicy, corev1.DNSClusterFirstWithHostNet, corev1.DNSClusterFirst, corev1.DNSDefault,
		corev1.DNSNone)
	c, dns := s.DNSConfig, path.Child("dnsConfig")
	switch {
	case c == nil && s.DNSPolicy == corev1.DNSNone:
		return append(errs, field.Required(dns, fmt.Sprintf("must provide `dnsConfig` when `dnsPolicy` is %s", corev1.DNSNone)))
	case c == nil:
		return errs
	case len(c.Nameservers) == 0 && s.DNSPolicy == corev1.DNSNone:
		return append(errs, field.Required(dns.Child("nameservers"),
			fmt.Sprintf("must provide at least one DNS nameserver when `dnsPolicy` is %s", corev1.DNSNone)))
	}
	const maxNameservers, maxSearches = 3, 32
	if len(c.Nameservers) > maxNameservers {
		errs = append(errs, field.Invalid(dns.Child("nameservers"), c.Nameservers,
			fmt.Sprintf("must not have more than %d nameservers", maxNameservers)))
	}
	for i, n := range c.Nameservers {
		errs = append(errs, validateIP(dns.Child("nameservers").Index(i), n)...)
	}
	if len(c.Searches) > maxSearches {
		errs = append(errs, field.Invalid(dns.Child("searches"), c.Searches, fmt.Sprintf("must not have more than %d search paths", maxSearches)))
	}
	for i, d := range c.Searches {
		if d != "." {
			errs = append(errs, store.Invalids(dns.Child("searches").Index(i), d,
				utilvalidation.IsDNS1123SubdomainWithUnderscore(strings.TrimSuffix(d, ".")))...)
		}
	}
	for i, o := range c.Options {
		if o.Name == "" {
			errs = append(errs, field.Required(dns.Child("options").Index(i), "must not be empty"))
		}
	}
	return errs
}

// containerNames collects what must be unique across a Pod's containers.
type containerNames map[string]bool

func validateContainers(s *corev1.PodSpec, volumes map[string]bool, path *field.Path) (errs field.ErrorList) {
	if len(s.Containers) == 0 {
		errs = append(errs, field.Required(path.Child("containers"), ""))
	}
	names, hostPorts := containerNames{}, map[string]bool{}
	for i := range s.Containers {
		errs = append(errs, validateContainer(&s.Containers[i], names, volumes, path.Child("containers").Index(i))...)
		errs = append(errs, validateHostPorts(&s.Containers[i], s.HostNetwork, hostPorts, path.Child("containers").Index(i))...)
	}
	for i := range s.InitContainers {
		c, p := &s.InitContainers[i], path.Child("initContainers").Index(i)
		errs = append(errs, validateContainer(c, names, volumes, p)...)
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			continue // a sidecar: it runs as long as the others
		}
		for name, set := range map[string]bool{
			"lifecycle": c.Lifecycle != nil, "livenessProbe": c.LivenessProbe != nil,
			"readinessProbe": c.ReadinessProbe != nil, "startupProbe": c.StartupProbe != nil,
		} {
			if set {
				errs = append(errs, field.Forbidden(p.Child(name), "may not be set for init containers without restartPolicy=Always"))
			}
		}
	}
	if len(s.EphemeralContainers) > 0 {
		errs = append(errs, field.Forbidden(path.Child("ephemeralContainers"), "cannot be set on create"))
	}
	return errs
}

func validateContainer(c *corev1.Container, names containerNames, volumes map[string]bool, path *field.Path) (errs field.ErrorList) {
	switch {
	case c.Name == "":
		errs = append(errs, field.Required(path.Child("name"), ""))
	case names[c.Name]:
		errs = append(errs, field.Duplicate(path.Child("name"), c.Name))
	default:
		errs = append(errs, store.Invalids(path.Child("name"), c.Name, utilvalidation.IsDNS1123Label(c.Name))...)
	}
	names[c.Name] = true
	if c.Image == "" {
		errs = append(errs, field.Required(path.Child("image"), ""))
	} else if strings.TrimSpace(c.Image) != c.Image {
		errs = append(errs, field.Invalid(path.Child("image"), c.Image, "must not have leading or trailing whitespace"))
	}
	errs = append(errs, oneOf(path.Child("imagePullPolicy"), c.ImagePullPolicy, corev1.PullAlways, corev1.PullIfNotPresent,
		corev1.PullNever)...)
	errs = append(errs, oneOf(path.Child("terminationMessagePolicy"), c.TerminationMessagePolicy, corev1.TerminationMessageReadFile,
		corev1.TerminationMessageFallbackToLogsOnError)...)
	errs = append(errs, validatePorts(c.Ports, path.Child("ports"))...)
	errs = append(errs, validateEnv(c, path)...)
	for i, m := range c.VolumeMounts {
		p := path.Child("volumeMounts").Index(i)
		switch {
		case m.Name == "":
			errs = append(errs, field.Required(p.Child("name"), ""))
		case !volumes[m.Name]:
			errs = append(errs, field.NotFound(p.Child("name"), m.Name))
		}
		if m.MountPath == "" {
			errs = append(errs, field.Required(p.Child("mountPath"), ""))
		}
	}
	errs = append(errs, validateProbe(c.LivenessProbe, true, path.Child("livenessProbe"))...)
	errs = append(errs, validateProbe(c.ReadinessProbe, false, path.Child("readinessProbe"))...)
	errs = append(errs, validateProbe(c.StartupProbe, true, path.Child("startupProbe"))...)
	if l := c.Lifecycle; l != nil {
		for name, h := range map[string]*corev1.LifecycleHandler{"postStart": l.PostStart, "preStop": l.PreStop} {
			if h != nil {
				errs = append(errs, validateLifecycle(h, path.Child("lifecycle", name))...)
			}
		}
	}
	return append(errs, validateResources(&c.Resources, path.Child("resources"))...)
}

func validatePorts(ports []corev1.ContainerPort, path *field.Path) (errs field.ErrorList) {
	names := map[string]bool{}
	for i, c := range ports {
		p := path.Index(i)
		if c.Name != "" {
			if msgs := utilvalidation.IsValidPortName(c.Name); len(msgs) > 0 {
				errs = append(errs, store.Invalids(p.Child("name"), c.Name, msgs)...)
			} else if names[c.Name] {
				errs = append(errs, field.Duplicate(p.Child("name"), c.Name))
			}
			names[c.Name] = true
		}
		if c.ContainerPort == 0 {
			errs = append(errs, field.Required(p.Child("containerPort"), ""))
		} else {
			errs = append(errs, store.Invalids(p.Child("containerPort"), c.ContainerPort, utilvalidation.IsValidPortNum(int(c.ContainerPort)))...)
		}
		if c.HostPort != 0 {
			errs = append(errs, store.Invalids(p.Child("hostPort"), c.HostPort, utilvalidation.IsValidPortNum(int(c.HostPort)))...)
		}
		if c.HostIP != "" {
			errs = append(errs, validateIP(p.Child("hostIP"), c.HostIP)...)
		}
		errs = append(errs, oneOf(p.Child("protocol"), c.Protocol, corev1.ProtocolSCTP, corev1.ProtocolTCP, corev1.ProtocolUDP)...)
	}
	return errs
}

// validateHostPorts rejects two containers on one port of the host, and for a
// pod in the host's network a host port that is not the container's.
func validateHostPorts(c *corev1.Container, hostNetwork bool, seen map[string]bool, path *field.Path) (errs field.ErrorList) {
	for i, port := range c.Ports {
		if port.HostPort == 0 {
			continue
		}
		p := path.Child("ports").Index(i)
		if hostNetwork && port.HostPort != port.ContainerPort {
			errs = append(errs, field.Invalid(p.Child("containerPort"), port.ContainerPort, "must match `hostPort` when `hostNetwork` is true"))
		}
		key := fmt.Sprintf("%s/%s/%d", port.Protocol, port.HostIP, port.HostPort)
		if seen[key] {
			errs = append(errs, field.Duplicate(p.Child("hostPort"), key))
		}
		seen[key] = true
	}
	return errs
}

func validateEnv(c *corev1.Container, path *field.Path) (errs field.ErrorList) {
	for i, e := range c.Env {
		p := path.Child("env").Index(i)
		if e.Name == "" {
			errs = append(errs, field.Required(p.Child("name"), ""))
		} else {
			errs = append(errs, store.Invalids(p.Child("name"), e.Name, utilvalidation.IsRelaxedEnvVarName(e.Name))...)
		}
		if e.ValueFrom == nil {
			continue
		}
		p = p.Child("valueFrom")
		n := count(e.ValueFrom.FieldRef != nil, e.ValueFrom.ResourceFieldRef != nil, e.ValueFrom.ConfigMapKeyRef != nil,
			e.ValueFrom.SecretKeyRef != nil, e.ValueFrom.FileKeyRef != nil)
		switch {
		case e.Value != "" && n > 0:
			errs = append(errs, field.Invalid(p, "", "may not be specified when `value` is not empty"))
		case n == 0:
			errs = append(errs, field.Invalid(p, "",
				"must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`"))
		case n > 1:
			errs = append(errs, field.Invalid(p, "", "may not have more than one field specified at a time"))
		}
		if r := e.ValueFrom.FieldRef; r != nil {
			errs = append(errs, validateFieldRef(r, p.Child("fieldRef"))...)
		}
		if r := e.ValueFrom.ConfigMapKeyRef; r != nil {
			errs = append(errs, validateKeyRef(r.Name, r.Key, p.Child("configMapKeyRef"))...)
		}
		if r := e.ValueFrom.SecretKeyRef; r != nil {
			errs = append(errs, validateKeyRef(r.Name, r.Key, p.Child("secretKeyRef"))...)
		}
	}
	for i, e := range c.EnvFrom {
		if n := count(e.ConfigMapRef != nil, e.SecretRef != nil); n != 1 {
			errs = append(errs, field.Invalid(path.Child("envFrom").Index(i), "", "must specify exactly one of: `configMapRef` or `secretRef`"))
		}
	}
	return errs
}

func validateFieldRef(r *corev1.ObjectFieldSelector, path *field.Path) (errs field.ErrorList) {
	allowed := []string{
		"metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName",
		"status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs",
	}
	switch f := r.FieldPath; {
	case f == "":
		errs = append(errs, field.Required(path.Child("fieldPath"), ""))
	case slices.Contains(allowed, f):
	case strings.HasPrefix(f, "metadata.annotations['") && strings.HasSuffix(f, "']"),
		strings.HasPrefix(f, "metadata.labels['") && strings.HasSuffix(f, "']"):
	case !slices.Contains([]string{"metadata.annotations", "metadata.labels", "spec.restartPolicy", "spec.schedulerName", "status.phase"}, f):
		errs = append(errs, field.Invalid(path.Child("fieldPath"), f, "error converting fieldPath: field label not supported: "+f))
	default: // known, but not in the environment
		errs = append(errs, field.NotSupported(path.Child("fieldPath"), f,
			append(allowed, "metadata.annotations['KEY']", "metadata.labels['KEY']")))
	}
	return errs
}

func validateKeyRef(_, key string, path *field.Path) field.ErrorList {
	if key == "" {
		return field.ErrorList{field.Required(path.Child("key"), "")}
	}
	return store.Invalids(path.Child("key"), key, utilvalidation.IsConfigMapKey(key))
}

func validateResources(r *corev1.ResourceRequirements, path *field.Path) (errs field.ErrorList) {
	for name, list := range map[string]corev1.ResourceList{"limits": r.Limits, "requests": r.Requests} {
		for k, q := range list {
			if q.Sign() < 0 {
				errs = append(errs, field.Invalid(path.Child(name).Key(string(k)), q.String(), "must be greater than or equal to 0"))
			}
		}
	}
	for k, q := range r.Requests {
		if limit, ok := r.Limits[k]; ok && q.Cmp(limit) > 0 {
			errs = append(errs, field.Invalid(path.Child("requests"), q.String(),
				fmt.Sprintf("must be less than or equal to %s limit of %s", k, limit.String())))
		}
	}
	return errs
}

func validateTolerations(list []corev1.Toleration, path *field.Path) (errs field.ErrorList) {
	for i, t := range list {
		p := path.Index(i)
		if t.Key != "" {
			errs = append(errs, unversioned.ValidateLabelName(t.Key, p.Child("key"))...)
		} else if t.Operator != corev1.TolerationOpExists {
			errs = append(errs, field.Invalid(p.Child("operator"), t.Operator,
				"operator must be Exists when `key` is empty, which means \"match all values and all keys\""))
		}
		switch t.Operator {
		case corev1.TolerationOpEqual, "":
			errs = append(errs, store.Invalids(p.Child("operator"), t.Value, utilvalidation.IsValidLabelValue(t.Value))...)
		case corev1.TolerationOpExists:
			if t.Value != "" {
				errs = append(errs, field.Invalid(p.Child("operator"), t.Value, "value must be empty when `operator` is 'Exists'"))
			}
		default:
			errs = append(errs, field.NotSupported(p.Child("operator"), t.Operator,
				[]corev1.TolerationOperator{corev1.TolerationOpEqual, corev1.TolerationOpExists}))
		}
		if t.Effect != "" {
			errs = append(errs, oneOf(p.Child("effect"), t.Effect, corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule,
				corev1.TaintEffectNoExecute)...)
		}
	}
	return errs
}

func validateStatus(s, old *corev1.PodStatus, path *field.Path) (errs field.ErrorList) {
	pod, host := func(ip corev1.PodIP) string { return ip.IP }, func(ip corev1.HostIP) string { return ip.IP }
	errs = append(errs, validateIPs(s.PodIPs, old.PodIPs, pod, path.Child("podIPs"))...)
	hosts := path.Child("hostIPs")
	if len(s.HostIPs) > 0 && s.HostIPs[0].IP != s.HostIP {
		errs = append(errs, field.Invalid(hosts.Index(0).Child("ip"), s.HostIPs[0].IP, "must be equal to `hostIP`"))
	}
	errs = append(errs, validateIPs(s.HostIPs, old.HostIPs, host, hosts)...)
	for i, c := range s.Conditions {
		if c.Type == "" {
			errs = append(errs, field.Required(path.Child("conditions").Index(i).Child("type"), ""))
		}
	}
	return errs
}

// validateIPs: one address, or one of each family. Addresses in old may keep a
// spelling that would be rejected now.
func validateIPs[T any](list, old []T, text func(T) string, path *field.Path) (errs field.ErrorList) {
	var ips, known []string
	for _, o := range old {
		known = append(known, text(o))
	}
	for i, e := range list {
		ips = append(ips, text(e))
		errs = append(errs, utilvalidation.IsValidIPForLegacyField(path.Index(i), ips[i], true, known)...)
	}
	if len(ips) < 2 {
		return errs
	}
	dual, err := netutils.IsDualStackIPStrings(ips)
	if err != nil {
		errs = append(errs, field.InternalError(path, fmt.Errorf("failed to check for dual stack with error:%w", err)))
	}
	if !dual || len(ips) > 2 {
		errs = append(errs, field.Invalid(path, list, "may specify no more than one IP for each IP family"))
	}
	return errs
}

func validateIP(path *field.Path, s string) field.ErrorList {
	if _, err := netip.ParseAddr(s); err != nil {
		return field.ErrorList{field.Invalid(path, s, "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)")}
	}
	return nil
}

// oneOf requires v to be one of allowed.
func oneOf[T ~string](path *field.Path, v T, allowed ...T) field.ErrorList {
	switch {
	case slices.Contains(allowed, v):
		return nil
	case v == "":
		return field.ErrorList{field.Required(path, "")}
	}
	return field.ErrorList{field.NotSupported(path, v, allowed)}
}

func count(set ...bool) (n int) {
	for _, s := range set {
		if s {
			n++
		}
	}
	return n
}
