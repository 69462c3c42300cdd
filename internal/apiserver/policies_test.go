package apiserver_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// policyTest is a namespace with policies that apply to nothing else.
type policyTest struct {
	hookTest
	audit string // file
	warns *warnings
}

// warnings collects what the server warns of.
type warnings struct {
	mu   sync.Mutex
	text []string
}

// HandleWarningHeader keeps a warning.
func (w *warnings) HandleWarningHeader(_ int, _, text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.text = append(w.text, text)
}

func (w *warnings) has(text string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.Contains(strings.Join(w.text, "\n"), text)
}

// match is of the kinds of group with the rules of the subtest.
func (p policyTest) match(group string, resources ...string) *admissionv1.MatchResources {
	return &admissionv1.MatchResources{NamespaceSelector: p.here(), ResourceRules: []admissionv1.NamedRuleWithOperations{{
		RuleWithOperations: admissionv1.RuleWithOperations{Operations: []admissionv1.OperationType{"CREATE", "UPDATE"},
			Rule: admissionv1.Rule{APIGroups: []string{group}, APIVersions: []string{"v1"}, Resources: resources}},
	}}}
}

func (p policyTest) policy(spec admissionv1.ValidatingAdmissionPolicySpec) {
	p.Helper()
	policies := p.client.AdmissionregistrationV1().ValidatingAdmissionPolicies()
	_, err := policies.Create(p.ctx, &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: p.ns}, Spec: spec},
		metav1.CreateOptions{})
	p.must(err)
}

func (p policyTest) bind(params *admissionv1.ParamRef, actions ...admissionv1.ValidationAction) {
	p.Helper()
	bindings := p.client.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings()
	_, err := bindings.Create(p.ctx, &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: p.ns},
		Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{PolicyName: p.ns, ParamRef: params, ValidationActions: actions},
	}, metav1.CreateOptions{})
	p.must(err)
}

func TestPolicies(t *testing.T) {
	t.Parallel()
	dir, audit := t.TempDir(), filepath.Join(t.TempDir(), "audit.log")
	options := func(o *apiserver.Options) {
		o.DataDir = dir
		o.Auth.Audit = genericoptions.NewAuditOptions()
		o.Auth.Audit.LogOptions.Path = audit
	}
	s, stop := apiservertest.StartStoppable(t, options)
	defer stop()
	for name, f := range map[string]func(policyTest){
		"params": testPolicyParams, "custom": testPolicyCustom, "warn": testPolicyWarns, "types": testPolicyTypes,
		"mutate": testPolicyMutates, "readers": func(p policyTest) { testPolicyReaders(p, s) },
	} {
		t.Run(name, func(t *testing.T) { f(newPolicyTest(t, s, name, audit)) })
	}
	kept := newPolicyTest(t, s, "kept", audit)
	kept.policy(admissionv1.ValidatingAdmissionPolicySpec{MatchConstraints: kept.match("", "services"),
		Validations: []admissionv1.Validation{{Expression: "false", Message: "never"}}})
	kept.bind(nil, admissionv1.Deny)
	kept.rejected("never")
	stop()
	s = apiservertest.StartServer(t, options)
	kept.client = kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	if _, err := kept.service("web"); err == nil || !strings.Contains(err.Error(), "never") {
		t.Errorf("the first request after a restart: %v", err)
	}
}

func newPolicyTest(t *testing.T, s *apiserver.Server, name, audit string) policyTest {
	ctx, cancel := context.WithTimeout(context.Background(), 4*waitTimeout)
	t.Cleanup(cancel)
	cfg := rest.CopyConfig(s.LoopbackConfig())
	w := &warnings{}
	cfg.WarningHandler = w
	p := policyTest{hookTest{api{t, ctx, cfg, kubernetes.NewForConfigOrDie(cfg), "policy-" + name}, nil}, audit, w}
	_, err := p.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: p.ns}}, metav1.CreateOptions{})
	p.must(err)
	return p
}

// A policy with a ConfigMap as parameter; the text is Kubernetes's.
func testPolicyParams(p policyTest) {
	p.policy(admissionv1.ValidatingAdmissionPolicySpec{
		ParamKind: &admissionv1.ParamKind{APIVersion: "v1", Kind: "ConfigMap"}, MatchConstraints: p.match("", "services"),
		MatchConditions: []admissionv1.MatchCondition{{Name: "not-free", Expression: "object.metadata.name != 'free'"}},
		Variables:       []admissionv1.Variable{{Name: "ports", Expression: "object.spec.ports.size()"}},
		Validations: []admissionv1.Validation{{Expression: "variables.ports <= int(params.data.max)",
			MessageExpression: "string(variables.ports) + ' ports of ' + params.data.max", Reason: new(metav1.StatusReasonForbidden)}},
	})
	p.bind(&admissionv1.ParamRef{Name: "limits", Namespace: p.ns, ParameterNotFoundAction: new(admissionv1.DenyAction)}, admissionv1.Deny)
	p.rejected("no params found for policy binding with `Deny` parameterNotFoundAction")
	limits := p.configMap("limits", nil)
	limits.Data = map[string]string{"max": "0"}
	limits, err := p.client.CoreV1().ConfigMaps(p.ns).Update(p.ctx, limits, metav1.UpdateOptions{})
	p.must(err)
	err = p.rejected("1 ports of 0")
	want := `services "probe" is forbidden: ValidatingAdmissionPolicy '` + p.ns + `' with binding '` + p.ns + `' denied request: 1 ports of 0`
	if !apierrors.IsForbidden(err) || err.Error() != want {
		p.Errorf("got %v, want %s", err, want)
	}
	if _, err := p.service("free"); err != nil {
		p.Errorf("a condition that is not met: %v", err)
	}
	limits.Data["max"] = "1"
	_, err = p.client.CoreV1().ConfigMaps(p.ns).Update(p.ctx, limits, metav1.UpdateOptions{})
	p.must(err)
	eventually(p, "the parameter is followed", func() bool {
		_, err := p.service("probe", metav1.DryRunAll)
		return err == nil
	})
}

// Custom resources as objects and as parameters.
func testPolicyCustom(p policyTest) {
	c := custom{p.T, p.ctx, p.cfg, dynamicOf(p.cfg), p.client}
	c.install("testdata/backups.yaml")
	in := c.objs.Resource(backups).Namespace(p.ns)
	_, err := in.Create(p.ctx, object(p.T, backup("limit", "{source: a, keep: 5}")), metav1.CreateOptions{})
	p.must(err)
	p.policy(admissionv1.ValidatingAdmissionPolicySpec{
		ParamKind: &admissionv1.ParamKind{APIVersion: "example.com/v1", Kind: "Backup"}, MatchConstraints: p.match("example.com", "backups"),
		Validations: []admissionv1.Validation{{Expression: "object.spec.keep <= params.spec.keep", Message: "keeps too many"}},
	})
	p.bind(&admissionv1.ParamRef{Name: "limit", ParameterNotFoundAction: new(admissionv1.DenyAction)}, admissionv1.Deny)
	eventually(p, "a Backup is rejected", func() bool {
		_, err := in.Create(p.ctx, object(p.T, backup("big", "{source: a, keep: 6}")), metav1.CreateOptions{DryRun: []string{"All"}})
		return err != nil && strings.Contains(err.Error(), "keeps too many")
	})
	if _, err := in.Create(p.ctx, object(p.T, backup("small", "{source: a, keep: 4}")), metav1.CreateOptions{}); err != nil {
		p.Error(err)
	}
}

// What a policy only warns of, or writes into the audit log, is let through.
func testPolicyWarns(p policyTest) {
	p.policy(admissionv1.ValidatingAdmissionPolicySpec{
		MatchConstraints: p.match("", "services"),
		Validations:      []admissionv1.Validation{{Expression: "object.metadata.name == 'x'", Message: "a strange name"}},
		AuditAnnotations: []admissionv1.AuditAnnotation{{Key: "name", ValueExpression: "'named ' + object.metadata.name"}},
	})
	p.bind(nil, admissionv1.Warn, admissionv1.Audit)
	eventually(p, "a warning", func() bool {
		_, err := p.service("probe", metav1.DryRunAll)
		p.must(err)
		return p.warns.has("Validation failed for ValidatingAdmissionPolicy '" + p.ns + "' with binding '" + p.ns + "': a strange name")
	})
	eventually(p, "the audit log has it", func() bool {
		text, err := os.ReadFile(p.audit)
		p.must(err)
		return bytes.Contains(text, []byte(`"validation.policy.admission.k8s.io/validation_failure"`)) &&
			bytes.Contains(text, []byte(`"`+p.ns+`/name":"named probe"`))
	})
}

// The status names the expressions that do not fit the kind.
func testPolicyTypes(p policyTest) {
	p.policy(admissionv1.ValidatingAdmissionPolicySpec{
		MatchConstraints: p.match("", "services"),
		Validations:      []admissionv1.Validation{{Expression: "object.spec.ports.size() > 0"}, {Expression: "object.spec.prots.size() > 0"}},
	})
	policies := p.client.AdmissionregistrationV1().ValidatingAdmissionPolicies()
	var got *admissionv1.ValidatingAdmissionPolicy
	eventually(p, "the types are checked", func() bool {
		var err error
		got, err = policies.Get(p.ctx, p.ns, metav1.GetOptions{})
		p.must(err)
		return got.Status.ObservedGeneration == 1
	})
	if c := got.Status.TypeChecking; c == nil || len(c.ExpressionWarnings) != 1 ||
		c.ExpressionWarnings[0].FieldRef != "spec.validations[1].expression" ||
		!strings.Contains(c.ExpressionWarnings[0].Warning, "undefined field 'prots'") {
		p.Errorf("%+v", c)
	}
	got.Spec.Validations = got.Spec.Validations[:1]
	_, err := policies.Update(p.ctx, got, metav1.UpdateOptions{})
	p.must(err)
	eventually(p, "they are checked again", func() bool {
		got, err := policies.Get(p.ctx, p.ns, metav1.GetOptions{})
		p.must(err)
		return got.Status.ObservedGeneration == 2 && (got.Status.TypeChecking == nil || len(got.Status.TypeChecking.ExpressionWarnings) == 0)
	})
}

// A policy changes objects, by apply configuration and by patch.
func testPolicyMutates(p policyTest) {
	policies := p.client.AdmissionregistrationV1()
	match := p.match("", "services", "configmaps")
	_, err := policies.MutatingAdmissionPolicies().Create(p.ctx, &admissionv1.MutatingAdmissionPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: p.ns},
		Spec: admissionv1.MutatingAdmissionPolicySpec{MatchConstraints: match, ReinvocationPolicy: admissionv1.NeverReinvocationPolicy,
			Mutations: []admissionv1.Mutation{
				{PatchType: admissionv1.PatchTypeApplyConfiguration, ApplyConfiguration: &admissionv1.ApplyConfiguration{
					Expression: `Object{metadata: Object.metadata{labels: {"applied": "yes"}}}`}},
				{PatchType: admissionv1.PatchTypeJSONPatch, JSONPatch: &admissionv1.JSONPatch{
					Expression: `[JSONPatch{op: "add", path: "/metadata/labels/patched", value: object.metadata.name}]`}},
			}}}, metav1.CreateOptions{})
	p.must(err)
	_, err = policies.MutatingAdmissionPolicyBindings().Create(p.ctx, &admissionv1.MutatingAdmissionPolicyBinding{
		ObjectMeta: metav1.ObjectMeta{Name: p.ns}, Spec: admissionv1.MutatingAdmissionPolicyBindingSpec{PolicyName: p.ns},
	}, metav1.CreateOptions{})
	p.must(err)
	eventually(p, "a Service is changed", func() bool {
		s, err := p.service("probe", metav1.DryRunAll)
		return err == nil && s.Labels["applied"] == "yes" && s.Labels["patched"] == "probe"
	})
	if c := p.configMap("c", map[string]string{"own": "kept"}); c.Labels["applied"] != "yes" || c.Labels["own"] != "kept" {
		p.Errorf("labels: %v", c.Labels)
	}
}

// Who writes a policy may read its parameters himself: its messages show them.
func testPolicyReaders(p policyTest, s *apiserver.Server) {
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: p.ns}, Rules: rules("get list", "configmaps")}
	role.Rules[0].Verbs = []string{"*"}
	role.Rules = append(role.Rules, role.Rules[0])
	role.Rules[1].APIGroups, role.Rules[1].Resources = []string{"admissionregistration.k8s.io"}, []string{"*"}
	_, err := p.client.RbacV1().ClusterRoles().Create(p.ctx, role, metav1.CreateOptions{})
	p.must(err)
	_, err = p.client.RbacV1().ClusterRoleBindings().Create(p.ctx, clusterBinding(p.ns, "polly"), metav1.CreateOptions{})
	p.must(err)
	polly := clientAs(s, "polly").AdmissionregistrationV1()
	make := func(kind string) error {
		_, err := polly.ValidatingAdmissionPolicies().Create(p.ctx, &admissionv1.ValidatingAdmissionPolicy{
			ObjectMeta: metav1.ObjectMeta{Name: p.ns},
			Spec: admissionv1.ValidatingAdmissionPolicySpec{ParamKind: &admissionv1.ParamKind{APIVersion: "v1", Kind: kind},
				MatchConstraints: p.match("", "services"), Validations: []admissionv1.Validation{{Expression: "true"}}}},
			metav1.CreateOptions{DryRun: []string{"All"}})
		return err
	}
	eventually(p, "polly writes policies", func() bool { return !apierrors.IsForbidden(make("ConfigMap")) })
	p.must(make("ConfigMap"))
	invalidAt(p.T, make("Secret"), "spec.paramKind")
	bind := func(policy string) error {
		_, err := polly.ValidatingAdmissionPolicyBindings().Create(p.ctx, &admissionv1.ValidatingAdmissionPolicyBinding{
			ObjectMeta: metav1.ObjectMeta{Name: p.ns}, Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{PolicyName: policy,
				ValidationActions: []admissionv1.ValidationAction{admissionv1.Warn},
				ParamRef:          &admissionv1.ParamRef{Name: "x", Namespace: p.ns, ParameterNotFoundAction: new(admissionv1.AllowAction)}},
		}, metav1.CreateOptions{DryRun: []string{"All"}})
		return err
	}
	invalidAt(p.T, bind("missing"), "spec.paramRef")
	p.policy(admissionv1.ValidatingAdmissionPolicySpec{ParamKind: &admissionv1.ParamKind{APIVersion: "v1", Kind: "Secret"},
		MatchConstraints: p.match("", "services"), Validations: []admissionv1.Validation{{Expression: "true"}}})
	invalidAt(p.T, bind(p.ns), "spec.paramRef")
}
