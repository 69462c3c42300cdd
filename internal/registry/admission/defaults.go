package admission

import (
	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
)

const (
	// defaultTimeout bounds a call of a webhook, in seconds.
	defaultTimeout int32 = 10
	// defaultPort is that of a webhook's Service.
	defaultPort int32 = 443
)

// AddToScheme adds the defaults.
func AddToScheme(s *runtime.Scheme) error {
	addDefaults(s, func(c *admissionv1.ValidatingWebhookConfiguration) {
		for i := range c.Webhooks {
			h := &c.Webhooks[i]
			defaultTo(&h.FailurePolicy, admissionv1.Fail)
			defaultTo(&h.TimeoutSeconds, defaultTimeout)
			defaultMatch(&h.MatchPolicy, &h.NamespaceSelector, &h.ObjectSelector)
			defaultClient(&h.ClientConfig, h.Rules)
		}
	})
	addDefaults(s, func(c *admissionv1.MutatingWebhookConfiguration) {
		for i := range c.Webhooks {
			h := &c.Webhooks[i]
			defaultTo(&h.FailurePolicy, admissionv1.Fail)
			defaultTo(&h.TimeoutSeconds, defaultTimeout)
			defaultTo(&h.ReinvocationPolicy, admissionv1.NeverReinvocationPolicy)
			defaultMatch(&h.MatchPolicy, &h.NamespaceSelector, &h.ObjectSelector)
			defaultClient(&h.ClientConfig, h.Rules)
		}
	})
	addDefaults(s, func(p *admissionv1.ValidatingAdmissionPolicy) {
		defaultTo(&p.Spec.FailurePolicy, admissionv1.Fail)
		defaultResources(p.Spec.MatchConstraints)
	})
	addDefaults(s, func(b *admissionv1.ValidatingAdmissionPolicyBinding) { defaultResources(b.Spec.MatchResources) })
	addDefaults(s, func(p *admissionv1.MutatingAdmissionPolicy) {
		defaultTo(&p.Spec.FailurePolicy, admissionv1.Fail)
		defaultResources(p.Spec.MatchConstraints)
	})
	addDefaults(s, func(b *admissionv1.MutatingAdmissionPolicyBinding) { defaultResources(b.Spec.MatchResources) })
	return nil
}

func addDefaults[T any, P interface {
	*T
	runtime.Object
}](s *runtime.Scheme, set func(P)) {
	s.AddTypeDefaultingFunc(P(new(T)), func(obj any) { set(obj.(P)) })
}

// defaultTo sets a pointer that is nil.
func defaultTo[T any](p **T, value T) {
	if *p == nil {
		*p = ptr.To(value)
	}
}

func defaultMatch(policy **admissionv1.MatchPolicyType, namespaces, objects **metav1.LabelSelector) {
	defaultTo(policy, admissionv1.Equivalent)
	defaultTo(namespaces, metav1.LabelSelector{})
	defaultTo(objects, metav1.LabelSelector{})
}

func defaultClient(c *admissionv1.WebhookClientConfig, rules []admissionv1.RuleWithOperations) {
	if c.Service != nil {
		defaultTo(&c.Service.Port, defaultPort)
	}
	for i := range rules {
		defaultTo(&rules[i].Scope, admissionv1.AllScopes)
	}
}

func defaultResources(m *admissionv1.MatchResources) {
	if m == nil {
		return
	}
	defaultMatch(&m.MatchPolicy, &m.NamespaceSelector, &m.ObjectSelector)
	for _, list := range [][]admissionv1.NamedRuleWithOperations{m.ResourceRules, m.ExcludeResourceRules} {
		for i := range list {
			defaultTo(&list[i].Scope, admissionv1.AllScopes)
		}
	}
}
