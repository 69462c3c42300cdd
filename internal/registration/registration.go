// Package registration knows the Pods that stand for programs which fairlead does not
// start: what such a Pod looks like, what it may ask for, and the files that describe it.
package registration

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	unversioned "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/fairlead/fairlead/internal/podspec"
	"github.com/fairlead/fairlead/internal/svc"
)

// annotations are the annotations of a registered Pod. They cannot be changed, and a Pod of
// another kind has no use for them.
var annotations = []string{svc.UnitAnnotation, svc.PIDFileAnnotation, svc.AddressAnnotation, svc.ServicesFileAnnotation}

// container is the name of the one container.
const container = "program"

// maxReadyTimeout bounds how long a program that hangs keeps its connections.
const maxReadyTimeout = time.Minute

// NoCheck as Spec.Ready asks for no check of the port.
const NoCheck = "none"

// Spec describes a program, by flags or in a file.
type Spec struct {
	// Name is the program's; the Pod's has the node's name behind it, so that one
	// program may run on several nodes.
	Name, Namespace, Node string
	Labels                map[string]string
	// Ports are as of podspec.ParsePort.
	Ports []string
	// Ready is as of podspec.ParseProbe, or NoCheck. Empty is a connection to the first
	// TCP port where there is neither Unit nor PIDFile.
	Ready string
	// ReadyTimeout is the longest wait for an answer of the check of Ready: a duration of
	// whole seconds, from 1s to maxReadyTimeout. Empty is 1s.
	ReadyTimeout string
	// Unit is the name of a unit of systemd; without a suffix, of a service.
	Unit string
	// PIDFile is the absolute path of a file.
	PIDFile string
	// Address is an IP address, empty for the node's own.
	Address string
	// Weight is its share of connections, as of svc.ParseWeight.
	Weight string
	// File is where the Spec was read, empty for one that a user has given himself.
	File string
}

// FieldError is what is wrong with a field of a Spec.
type FieldError struct {
	// Field is its name in a file, such as pidFile.
	Field string
	Err   error
}

func (e FieldError) Error() string { return e.Field + ": " + e.Err.Error() }

func (e FieldError) Unwrap() error { return e.Err }

func wrong(field, format string, args ...any) error {
	return FieldError{field, fmt.Errorf(format, args...)}
}

// PodName is the name of the Pod of a program on a node.
func PodName(program, node string) string {
	return svc.Shorten(program+"-"+strings.ReplaceAll(node, ".", "-"), validation.DNS1123SubdomainMaxLength)
}

// Pod returns the Pod of s. An error is a FieldError.
func (s *Spec) Pod() (*corev1.Pod, error) {
	if errs := validation.IsDNS1123Label(s.Name); len(errs) > 0 {
		return nil, wrong("name", "%q: %s", s.Name, errs[0])
	}
	if errs := unversioned.ValidateLabels(s.Labels, field.NewPath("labels")); len(errs) > 0 {
		return nil, wrong("labels", "%s", errs[0].ErrorBody())
	}
	c := corev1.Container{
		Name: container, Image: svc.RegisteredImage, ImagePullPolicy: corev1.PullAlways,
		TerminationMessagePath:   corev1.TerminationMessagePathDefault,
		TerminationMessagePolicy: corev1.TerminationMessageReadFile,
	}
	if len(s.Ports) == 0 {
		return nil, wrong("ports", "on which port does it listen? for example redis=6379")
	}
	for _, text := range s.Ports {
		port, err := podspec.ParsePort(text)
		if err != nil {
			return nil, wrong("ports", "%w", err)
		}
		port.HostPort = port.ContainerPort
		c.Ports = append(c.Ports, port)
	}
	var err error
	if c.ReadinessProbe, err = s.probe(c.Ports); err != nil {
		return nil, err
	}
	notes, err := s.annotations()
	if err != nil {
		return nil, err
	}
	grace, no := int64(0), false
	return &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Name: PodName(s.Name, s.Node), Namespace: s.Namespace, Labels: s.Labels, Annotations: notes},
		Spec: corev1.PodSpec{
			NodeName: s.Node, HostNetwork: true, Containers: []corev1.Container{c},
			// Nothing runs that could need a moment, or a token.
			TerminationGracePeriodSeconds: &grace, AutomountServiceAccountToken: &no, EnableServiceLinks: &no,
			// A program goes on when its node has a taint.
			Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
		},
	}, nil
}

func (s *Spec) probe(ports []corev1.ContainerPort) (*corev1.Probe, error) {
	timeout, err := s.readyTimeout()
	if s.Ready == NoCheck || err != nil {
		return nil, err
	}
	probe, err := podspec.ParseProbe(s.Ready)
	if err != nil {
		return nil, wrong("ready", "%w", err)
	}
	tcp := slices.IndexFunc(ports, func(p corev1.ContainerPort) bool { return p.Protocol == corev1.ProtocolTCP })
	if probe == nil && s.Unit+s.PIDFile == "" && tcp >= 0 {
		probe = &corev1.Probe{PeriodSeconds: 1, TimeoutSeconds: 1, FailureThreshold: 1}
		probe.TCPSocket = &corev1.TCPSocketAction{Port: intstr.FromInt32(ports[tcp].ContainerPort)}
	}
	if probe != nil {
		probe.SuccessThreshold = 1
		probe.TimeoutSeconds = int32(timeout / time.Second)
	}
	return probe, nil
}

func (s *Spec) readyTimeout() (time.Duration, error) {
	if s.ReadyTimeout == "" {
		return time.Second, nil
	}
	d, err := time.ParseDuration(s.ReadyTimeout)
	switch {
	case err != nil || d < time.Second || d > maxReadyTimeout || d%time.Second != 0:
		return 0, wrong("readyTimeout", "%q: want whole seconds, from 1s to 60s", s.ReadyTimeout)
	case s.Ready == NoCheck, s.Ready == "" && s.Unit+s.PIDFile != "":
		return 0, wrong("readyTimeout", "there is no check that it bounds: give ready as well")
	}
	return d, nil
}

func (s *Spec) annotations() (map[string]string, error) {
	out := map[string]string{}
	if s.Unit != "" && s.PIDFile != "" {
		return nil, wrong("pidFile", "a program is known by its unit or by a file with its process ID: give one of both")
	}
	if s.Unit != "" {
		name := s.Unit
		if !unitType.MatchString(name) {
			name += ".service"
		}
		out[svc.UnitAnnotation] = name
	}
	if s.PIDFile != "" {
		out[svc.PIDFileAnnotation] = s.PIDFile
	}
	if s.Address != "" {
		out[svc.AddressAnnotation] = s.Address
	}
	if s.File != "" {
		out[svc.ServicesFileAnnotation] = s.File
	}
	if s.Weight != "" {
		out[svc.WeightAnnotation] = s.Weight
	}
	for key, check := range checks {
		if v, ok := out[key]; ok {
			if err := check.valid(v); err != nil {
				return nil, wrong(check.field, "%q: %w", v, err)
			}
		}
	}
	return out, nil
}

// unitName is a name of a unit (systemd.unit(5)): at most 255 characters, the last of which
// are its type.
var (
	unitName = regexp.MustCompile(`^[a-zA-Z0-9:_.\\@-]{1,245}$`)
	unitType = regexp.MustCompile(`\.(service|socket|target|mount|automount|swap|path|timer|slice|scope)$`)
)

// checks check the values of annotations; field is the name in a file.
var checks = map[string]struct {
	field string
	valid func(string) error
}{
	svc.UnitAnnotation: {"unit", func(s string) error {
		if !unitName.MatchString(s) || !unitType.MatchString(s) {
			return errors.New("want the name of a unit of systemd, such as redis.service")
		}
		return nil
	}},
	svc.PIDFileAnnotation: {"pidFile", func(s string) error {
		if !filepath.IsAbs(s) || filepath.Clean(s) != s {
			return errors.New("want an absolute path, such as /run/redis.pid")
		}
		return nil
	}},
	svc.AddressAnnotation: {"address", func(s string) error {
		_, err := parseAddress(s)
		return err
	}},
	svc.WeightAnnotation: {"weight", func(s string) error {
		if _, ok := svc.ParseWeight(s); !ok {
			return fmt.Errorf("want a number from 0 to %d", svc.MaxWeight)
		}
		return nil
	}},
}

// parseAddress reads the address of a program. Those that Kubernetes rejects in endpoints
// are rejected here, too: they mean another machine for each client.
func parseAddress(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	switch {
	case err != nil || a.Zone() != "" || a.Is4In6():
		return netip.Addr{}, errors.New("want an IP address, such as 10.1.2.3")
	case a.IsLoopback(), a.IsUnspecified():
		return netip.Addr{}, errors.New("other nodes cannot reach it; without an address it is the node's")
	case a.IsLinkLocalUnicast(), a.IsMulticast():
		return netip.Addr{}, errors.New("it is link-local or multicast")
	}
	return a, nil
}

// Is reports whether a Pod stands for a program that no node starts.
func Is(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Spec.Containers, func(c corev1.Container) bool { return c.Image == svc.RegisteredImage })
}

// Address returns the address of a registered Pod; invalid for the node's own.
func Address(p *corev1.Pod) netip.Addr {
	a, _ := parseAddress(p.Annotations[svc.AddressAnnotation])
	return a
}

// Validate returns what is wrong with a registered Pod; of others, a use of Image in a
// place where it means nothing. hostNetwork makes Pod Security treat it as what it is: it
// has an address of the machine.
func Validate(p *corev1.Pod) (errs field.ErrorList) {
	spec := field.NewPath("spec")
	for i := range p.Spec.InitContainers {
		if p.Spec.InitContainers[i].Image == svc.RegisteredImage {
			errs = append(errs, field.Invalid(spec.Child("initContainers").Index(i).Child("image"), svc.RegisteredImage,
				"this image is for the one container of a Pod"))
		}
	}
	if !Is(p) {
		return errs
	}
	forbid := func(path *field.Path, set bool) {
		if set {
			errs = append(errs, field.Forbidden(path, "a Pod of the image "+svc.RegisteredImage+" has no process"))
		}
	}
	if !p.Spec.HostNetwork {
		errs = append(errs, field.Required(spec.Child("hostNetwork"), "a Pod of the image "+svc.RegisteredImage+" has an address of the machine"))
	}
	if p.Spec.NodeName == "" {
		errs = append(errs, field.Required(spec.Child("nodeName"), "the node whose agent checks the program"))
	}
	if len(p.Spec.Containers) > 1 || len(p.Spec.InitContainers) > 0 {
		errs = append(errs, field.Forbidden(spec.Child("containers"), "a Pod of the image "+svc.RegisteredImage+" has one container"))
	}
	forbid(spec.Child("volumes"), len(p.Spec.Volumes) > 0)
	forbid(spec.Child("activeDeadlineSeconds"), p.Spec.ActiveDeadlineSeconds != nil)
	forbid(spec.Child("resources"), p.Spec.Resources != nil && !isZero(*p.Spec.Resources))
	forbid(spec.Child("securityContext"), p.Spec.SecurityContext != nil && !isZero(*p.Spec.SecurityContext))
	for i := range p.Spec.Containers {
		c, at := &p.Spec.Containers[i], spec.Child("containers").Index(i)
		forbid(at.Child("command"), len(c.Command) > 0)
		forbid(at.Child("args"), len(c.Args) > 0)
		forbid(at.Child("env"), len(c.Env)+len(c.EnvFrom) > 0)
		forbid(at.Child("workingDir"), c.WorkingDir != "")
		forbid(at.Child("stdin"), c.Stdin || c.StdinOnce)
		forbid(at.Child("tty"), c.TTY)
		forbid(at.Child("volumeMounts"), len(c.VolumeMounts)+len(c.VolumeDevices) > 0)
		forbid(at.Child("resources"), !isZero(c.Resources))
		forbid(at.Child("securityContext"), c.SecurityContext != nil && !isZero(*c.SecurityContext))
		forbid(at.Child("lifecycle"), c.Lifecycle != nil)
		forbid(at.Child("livenessProbe"), c.LivenessProbe != nil)
		forbid(at.Child("startupProbe"), c.StartupProbe != nil)
	}
	for key, check := range checks {
		if v, ok := p.Annotations[key]; ok {
			if err := check.valid(v); err != nil {
				errs = append(errs, field.Invalid(field.NewPath("metadata", "annotations").Key(key), v, err.Error()))
			}
		}
	}
	return errs
}

// isZero reports whether nothing is set in v; empty lists and maps are nothing.
func isZero[T any](v T) bool { return equality.Semantic.DeepEqual(v, *new(T)) }

// ValidateUpdate returns what of an update would make a registration another one, or of
// another Pod one: who may make it was decided when the Pod was created.
func ValidateUpdate(p, old *corev1.Pod) (errs field.ErrorList) {
	for i := range p.Spec.Containers {
		if i < len(old.Spec.Containers) && (p.Spec.Containers[i].Image == svc.RegisteredImage) !=
			(old.Spec.Containers[i].Image == svc.RegisteredImage) {
			errs = append(errs, field.Forbidden(field.NewPath("spec", "containers").Index(i).Child("image"),
				"a Pod keeps being one of the image "+svc.RegisteredImage+", or of another one"))
		}
	}
	if !Is(old) {
		return errs
	}
	for _, key := range annotations {
		if p.Annotations[key] != old.Annotations[key] {
			errs = append(errs, field.Forbidden(field.NewPath("metadata", "annotations").Key(key),
				"it cannot be changed: register the program again"))
		}
	}
	return errs
}

// Same reports whether have, a Pod of the API, is the Pod want of a Spec.
func Same(have, want *corev1.Pod) bool {
	if !Is(have) || len(have.Spec.Containers) != 1 || have.DeletionTimestamp != nil || have.Spec.NodeName != want.Spec.NodeName {
		return false
	}
	for _, key := range append(slices.Clone(annotations), svc.WeightAnnotation) {
		if have.Annotations[key] != want.Annotations[key] {
			return false
		}
	}
	a, b := &have.Spec.Containers[0], &want.Spec.Containers[0]
	return equality.Semantic.DeepEqual(have.Labels, want.Labels) && equality.Semantic.DeepEqual(a.Ports, b.Ports) &&
		equality.Semantic.DeepEqual(a.ReadinessProbe, b.ReadinessProbe)
}
