package admit

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	admissionv1 "k8s.io/api/admission/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/warning"
	"k8s.io/client-go/kubernetes"
	corev1listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/component-base/metrics/legacyregistry"
	podsecurity "k8s.io/pod-security-admission/admission"
	podsecurityconfig "k8s.io/pod-security-admission/admission/api"
	podsecurityapi "k8s.io/pod-security-admission/api"
	podsecuritymetrics "k8s.io/pod-security-admission/metrics"
	"k8s.io/pod-security-admission/policy"

	"github.com/fairlead/fairlead/internal/apiserver/access"
	"github.com/fairlead/fairlead/internal/svc"
)

// DefaultPodSecurity is the level for Pods in namespaces without labels.
const DefaultPodSecurity = string(podsecurityapi.LevelBaseline)

// podSecurityMinor is the newest version of the levels that the library knows: 1.37.
const podSecurityMinor = 37

// podSecurity is the admission plugin PodSecurity: the levels of
// https://kubernetes.io/docs/concepts/security/pod-security-standards/ by the labels of
// a Pod's namespace, else by a default. It writes the enforced level into each new Pod
// (svc.PodSecurityAnnotation), where the node reads what the Pod may be.
type podSecurity struct {
	*admission.Handler
	authorizer authorizer.UnconditionalAuthorizer
	// others has the default of the server, free the default privileged.
	others, free *podsecurity.Admission
}

var (
	_ admission.MutationInterface   = &podSecurity{}
	_ admission.ValidationInterface = &podSecurity{}
)

// podSecurityMetrics are the metrics of kube-apiserver. They belong to the process.
var podSecurityMetrics = sync.OnceValue(func() podsecuritymetrics.Recorder {
	r := podsecuritymetrics.NewPrometheusRecorder(podsecurityapi.MajorMinorVersion(1, podSecurityMinor))
	r.MustRegister(legacyregistry.MustRegister)
	return r
})

// NewPodSecurity makes the plugin. level is as of ParsePodSecurity.
func NewPodSecurity(level string, client kubernetes.Interface, namespaces corev1listers.NamespaceLister,
	a authorizer.UnconditionalAuthorizer,
) (*podSecurity, error) {
	byDefault, err := ParsePodSecurity(level)
	if err != nil {
		return nil, err
	}
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		return nil, err
	}
	make := func(d podsecurityapi.LevelVersion) (*podsecurity.Admission, error) {
		level, version := string(d.Level), d.Version.String()
		p := &podsecurity.Admission{
			Configuration: &podsecurityconfig.PodSecurityConfiguration{Defaults: podsecurityconfig.PodSecurityDefaults{
				Enforce: level, EnforceVersion: version, Audit: level, AuditVersion: version, Warn: level, WarnVersion: version,
			}},
			Evaluator: evaluator, Metrics: podSecurityMetrics(), PodSpecExtractor: podsecurity.DefaultPodSpecExtractor{},
			NamespaceGetter: podsecurity.NamespaceGetterFromListerAndClient(namespaces, client),
			PodLister:       podsecurity.PodListerFromClient(client),
		}
		return p, errors.Join(p.CompleteConfiguration(), p.ValidateConfiguration())
	}
	p := &podSecurity{Handler: admission.NewHandler(admission.Create, admission.Update), authorizer: a}
	var err1, err2 error
	p.others, err1 = make(byDefault)
	p.free, err2 = make(podsecurityapi.LevelVersion{Level: podsecurityapi.LevelPrivileged, Version: podsecurityapi.LatestVersion()})
	return p, errors.Join(err1, err2)
}

// ParsePodSecurity reads LEVEL or LEVEL:VERSION, such as baseline or baseline:v1.37.
func ParsePodSecurity(s string) (podsecurityapi.LevelVersion, error) {
	name, version, given := strings.Cut(s, ":")
	if !given {
		version = podsecurityapi.VersionLatest
	}
	level, err1 := podsecurityapi.ParseLevel(name)
	v, err2 := podsecurityapi.ParseVersion(version)
	if err1 != nil || err2 != nil {
		return podsecurityapi.LevelVersion{}, fmt.Errorf("--pod-security-default %q: want privileged, baseline or restricted, "+
			"and a version after a colon if it is not to be the latest, such as baseline:v1.37", s)
	}
	return podsecurityapi.LevelVersion{Level: level, Version: v}, nil
}

// rules returns the plugin for the user of a.
func (p *podSecurity) rules(ctx context.Context, a admission.Attributes) (*podsecurity.Admission, error) {
	if a.GetResource().Resource != "pods" {
		return p.others, nil
	}
	if showsStatic(a) {
		return p.free, nil
	}
	may, err := access.MayUse(ctx, p.authorizer, a, access.PrivilegedResource)
	switch {
	case err != nil:
		return nil, err
	case may:
		return p.free, nil
	}
	return p.others, nil
}

// showsStatic reports whether a request of a node is about a Pod that shows a static one: it
// runs already and whoever is root there has made it, so the default is not about it. Labels are.
func showsStatic(a admission.Attributes) bool {
	pod, ok := a.GetObject().(*corev1.Pod)
	_, isNode := access.NodeOf(a.GetUserInfo())
	return ok && isNode && pod.Annotations[corev1.MirrorPodAnnotationKey] != ""
}

// enforced returns the level that a new Pod of a must keep.
func (p *podSecurity) enforced(ctx context.Context, a admission.Attributes) (podsecurityapi.Level, error) {
	rules, err := p.rules(ctx, a)
	if err != nil {
		return "", err
	}
	ns, err := rules.NamespaceGetter.GetNamespace(ctx, a.GetNamespace())
	if err != nil {
		return "", apierrors.NewInternalError(fmt.Errorf("cannot read the labels of namespace %s: %w", a.GetNamespace(), err))
	}
	effective, _ := rules.PolicyToEvaluate(ns.Labels) // a wrong label means restricted, and Validate names it
	return effective.Enforce.Level, nil
}

func apps(resource string) schema.GroupResource {
	return schema.GroupResource{Group: appsv1.GroupName, Resource: resource}
}

func createsPod(a admission.Attributes) bool {
	return a.GetOperation() == admission.Create && a.GetResource().GroupResource() == corev1.Resource("pods") && a.GetSubresource() == ""
}

// Admit writes the enforced level into a new Pod, whatever its author has written there.
func (p *podSecurity) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	pod, ok := a.GetObject().(*corev1.Pod)
	if !ok || !createsPod(a) {
		return nil
	}
	level, err := p.enforced(ctx, a)
	if err != nil {
		return err
	}
	if pod.Annotations == nil {
		pod.Annotations = map[string]string{}
	}
	pod.Annotations[svc.PodSecurityAnnotation] = string(level)
	return nil
}

// Validate rejects Pods that the policy forbids, and labels of namespaces that are
// wrong; it warns and annotates the audit log as the policy says.
func (p *podSecurity) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	switch a.GetResource().GroupResource() {
	case corev1.Resource("pods"), corev1.Resource("namespaces"):
	case apps("deployments"), apps("replicasets"), apps("daemonsets"):
		// A template only gets warnings: the Pod is checked when it is created, as one of its controller.
	default:
		return nil // no other kind that is served has Pods in it
	}
	rules, err := p.rules(ctx, a)
	if err != nil {
		return err
	}
	answer := rules.Validate(ctx, podSecurityAttributes{a})
	for _, w := range answer.Warnings {
		warning.AddWarning(ctx, "", w)
	}
	for k, v := range answer.AuditAnnotations {
		audit.AddAuditAnnotation(ctx, podsecurityapi.AuditAnnotationPrefix+k, v)
	}
	if !answer.Allowed {
		return podSecurityError(a, answer)
	}
	return p.checkLevel(ctx, a)
}

// checkLevel rejects a new Pod whose level is another one by now: a webhook has changed
// it, or the labels of the namespace have changed since.
func (p *podSecurity) checkLevel(ctx context.Context, a admission.Attributes) error {
	pod, ok := a.GetObject().(*corev1.Pod)
	if !ok || !createsPod(a) {
		return nil
	}
	level, err := p.enforced(ctx, a)
	if err != nil {
		return err
	}
	if have := pod.Annotations[svc.PodSecurityAnnotation]; have != string(level) {
		return admission.NewForbidden(a, fmt.Errorf("the annotation %s is %q and must be %q, which the server sets: "+
			"the labels of the namespace have just changed, or a webhook has changed it", svc.PodSecurityAnnotation, have, level))
	}
	return nil
}

// podSecurityError is the answer as kube-apiserver's plugin gives it.
func podSecurityError(a admission.Attributes, answer *admissionv1.AdmissionResponse) error {
	err := admission.NewForbidden(a, errors.New("Not allowed by PodSecurity")) //nolint:staticcheck // the text of kube-apiserver
	var status *apierrors.StatusError
	if !errors.As(err, &status) || answer.Result == nil {
		return err
	}
	if answer.Result.Message != "" {
		status.ErrStatus.Message = answer.Result.Message
	}
	if answer.Result.Reason != "" {
		status.ErrStatus.Reason = answer.Result.Reason
	}
	if answer.Result.Details != nil {
		status.ErrStatus.Details = answer.Result.Details
	}
	if answer.Result.Code != 0 {
		status.ErrStatus.Code = answer.Result.Code
	}
	return status
}

// podSecurityAttributes are attributes as the library reads them.
type podSecurityAttributes struct{ admission.Attributes }

// GetObject returns the new object.
func (a podSecurityAttributes) GetObject() (runtime.Object, error) {
	return a.Attributes.GetObject(), nil
}

// GetOldObject returns the object as it was.
func (a podSecurityAttributes) GetOldObject() (runtime.Object, error) {
	return a.Attributes.GetOldObject(), nil
}

// GetOperation returns the operation.
func (a podSecurityAttributes) GetOperation() admissionv1.Operation {
	return admissionv1.Operation(a.Attributes.GetOperation())
}

// GetUserName returns who asks.
func (a podSecurityAttributes) GetUserName() string { return userName(a.GetUserInfo()) }

func userName(u user.Info) string {
	if u == nil {
		return ""
	}
	return u.GetName()
}
