package apiserver_test

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	admissionreview "k8s.io/api/admission/v1"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// reviewer is an HTTPS server of webhooks on loopback. The path of a URL says what it
// answers.
type reviewer struct {
	*httptest.Server
	hang chan struct{} // closed at the end of the test

	mu    sync.Mutex
	asked []admissionreview.AdmissionRequest
}

func newReviewer(t *testing.T) *reviewer {
	r := &reviewer{hang: make(chan struct{})}
	r.Server = httptest.NewTLSServer(http.HandlerFunc(r.review))
	t.Cleanup(r.Close)
	t.Cleanup(func() { close(r.hang) })
	return r
}

func (r *reviewer) review(w http.ResponseWriter, req *http.Request) {
	var review admissionreview.AdmissionReview
	if err := json.NewDecoder(req.Body).Decode(&review); err != nil || review.Request == nil {
		http.Error(w, fmt.Sprint(err), http.StatusBadRequest)
		return
	}
	r.mu.Lock()
	r.asked = append(r.asked, *review.Request)
	r.mu.Unlock()
	answer := &admissionreview.AdmissionResponse{UID: review.Request.UID, Allowed: true}
	patch := func(text string) {
		kind := admissionreview.PatchTypeJSONPatch
		answer.Patch, answer.PatchType = []byte(text), &kind
	}
	switch path := strings.Trim(req.URL.Path, "/"); path {
	case "allow":
	case "reject":
		answer.Allowed = false
		answer.Result = &metav1.Status{Code: http.StatusTeapot, Message: "not today"}
	case "warn":
		answer.Warnings = []string{"mind the gap"}
	case "hang":
		select {
		case <-r.hang:
		case <-req.Context().Done():
		}
	case "labelled": // once another webhook has set a label
		if strings.Contains(string(review.Request.Object.Raw), `"labels"`) {
			patch(`[{"op":"add","path":"/metadata/labels/first","value":"saw-it"}]`)
		}
	case "garbage":
		_, _ = w.Write([]byte("no review"))
		return
	default: // a patch, %-encoded
		patch(path)
	}
	review.Request, review.Response = nil, answer
	_ = json.NewEncoder(w).Encode(review)
}

// requests returns what was asked about objects of the name.
func (r *reviewer) requests(name string) (out []admissionreview.AdmissionRequest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, a := range r.asked {
		if a.Name == name {
			out = append(out, a)
		}
	}
	return out
}

func (r *reviewer) at(path string) admissionv1.WebhookClientConfig {
	url := r.URL + "/" + path
	return admissionv1.WebhookClientConfig{URL: &url,
		CABundle: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: r.Certificate().Raw})}
}

// hookTest is a namespace with the webhooks of one subtest.
type hookTest struct {
	api
	*reviewer
}

// anything is the rule that matches every request of the scope.
func anything(scope admissionv1.ScopeType) []admissionv1.RuleWithOperations {
	return []admissionv1.RuleWithOperations{{Operations: []admissionv1.OperationType{"*"},
		Rule: admissionv1.Rule{APIGroups: []string{"*"}, APIVersions: []string{"*"}, Resources: []string{"*/*"}, Scope: &scope}}}
}

func (h hookTest) validating(path string, change ...func(*admissionv1.ValidatingWebhook)) {
	h.Helper()
	w := admissionv1.ValidatingWebhook{
		Name: "a.example.com", ClientConfig: h.reviewer.at(path), Rules: anything(admissionv1.NamespacedScope),
		SideEffects:             new(admissionv1.SideEffectClassNoneOnDryRun),
		AdmissionReviewVersions: []string{"v1"}, NamespaceSelector: h.here(),
	}
	for _, f := range change {
		f(&w)
	}
	configs := h.client.AdmissionregistrationV1().ValidatingWebhookConfigurations()
	_, err := configs.Create(h.ctx, &admissionv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: h.ns},
		Webhooks: []admissionv1.ValidatingWebhook{w}}, metav1.CreateOptions{})
	h.must(err)
}

func (h hookTest) mutating(hooks ...admissionv1.MutatingWebhook) {
	h.Helper()
	configs := h.client.AdmissionregistrationV1().MutatingWebhookConfigurations()
	_, err := configs.Create(h.ctx, &admissionv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: h.ns}, Webhooks: hooks},
		metav1.CreateOptions{})
	h.must(err)
}

func (h hookTest) mutator(name, path string) admissionv1.MutatingWebhook {
	return admissionv1.MutatingWebhook{
		Name: name + ".example.com", ClientConfig: h.reviewer.at(path), Rules: anything(admissionv1.NamespacedScope),
		SideEffects:             new(admissionv1.SideEffectClassNone),
		AdmissionReviewVersions: []string{"v1"}, NamespaceSelector: h.here(),
	}
}

// here selects the namespace of the subtest.
func (h hookTest) here() *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: h.ns}}
}

func (h hookTest) service(name string, dryRun ...string) (*corev1.Service, error) {
	return h.client.CoreV1().Services(h.ns).Create(h.ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}, metav1.CreateOptions{DryRun: dryRun})
}

// rejected waits until the webhooks have their effect: creating a Service fails with
// the text.
func (h hookTest) rejected(text string) (err error) {
	h.Helper()
	eventually(h, "rejected: "+text, func() bool {
		_, err = h.service("probe", metav1.DryRunAll)
		return err != nil && strings.Contains(err.Error(), text)
	})
	return err
}

// asks waits until the webhooks are asked about Services.
func (h hookTest) asks() {
	h.Helper()
	eventually(h, "the webhook is asked", func() bool {
		_, _ = h.service("probe", metav1.DryRunAll)
		return len(h.requests("probe")) > 0
	})
}

func TestWebhooks(t *testing.T) {
	cfg := apiservertest.Start(t)
	client := kubernetes.NewForConfigOrDie(cfg)
	for name, f := range map[string]func(hookTest){
		"reject": testHookRejects, "mutate": testHookMutates, "reinvoke": testHookReinvoked, "dry run": testHookDryRun,
		"gone": testHookGone, "timeout": testHookTimeout, "conditions": testHookConditions, "custom": testHookCustom,
		"configurations": testHookExempt, "metrics": testHookMetrics,
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), 4*waitTimeout)
			t.Cleanup(cancel)
			h := hookTest{api{t, ctx, cfg, client, "hook-" + strings.ReplaceAll(name, " ", "-")}, newReviewer(t)}
			_, err := client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: h.ns}}, metav1.CreateOptions{})
			h.must(err)
			f(h)
		})
	}
}

// A webhook rejects with its own text and code, whatever is asked of an object.
func testHookRejects(h hookTest) {
	kept, err := h.service("kept")
	h.must(err)
	h.validating("reject", func(w *admissionv1.ValidatingWebhook) {
		w.ObjectSelector = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "free", Operator: "DoesNotExist"}}}
	})
	const text = `admission webhook "a.example.com" denied the request: not today`
	err = h.rejected(text)
	if s, ok := err.(apierrors.APIStatus); !ok || s.Status().Code != http.StatusTeapot {
		h.Errorf("%v", err)
	}
	services := h.client.CoreV1().Services(h.ns)
	for what, f := range map[string]func() error{
		"delete": func() error { return services.Delete(h.ctx, "kept", metav1.DeleteOptions{}) },
		"update": func() error { _, err := services.Update(h.ctx, kept, metav1.UpdateOptions{}); return err },
		"status": func() error { _, err := services.UpdateStatus(h.ctx, kept, metav1.UpdateOptions{}); return err },
		"patch": func() error {
			_, err := services.Patch(h.ctx, "kept", types.MergePatchType, []byte(`{"metadata":{"labels":{"a":"b"}}}`), metav1.PatchOptions{})
			return err
		},
	} {
		if err := f(); err == nil || !strings.Contains(err.Error(), text) {
			h.Errorf("%s: %v", what, err)
		}
	}
	free := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "free", Labels: map[string]string{"free": "yes"}}}
	if _, err := h.client.CoreV1().ConfigMaps(h.ns).Create(h.ctx, free, metav1.CreateOptions{}); err != nil {
		h.Errorf("an object that is not selected: %v", err)
	}
	if _, err := h.client.CoreV1().ConfigMaps("default").List(h.ctx, metav1.ListOptions{}); err != nil {
		h.Errorf("a read: %v", err)
	}
	elsewhere := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "elsewhere-"}}
	if _, err := h.client.CoreV1().ConfigMaps("default").Create(h.ctx, elsewhere, metav1.CreateOptions{}); err != nil {
		h.Errorf("a namespace that is not selected: %v", err)
	}
	var deleted bool
	for _, r := range h.requests("kept") {
		deleted = deleted || r.Operation == "DELETE" && len(r.Object.Raw) == 0 && strings.Contains(string(r.OldObject.Raw), `"kind":"Service"`) &&
			r.Namespace == h.ns && r.Resource.Resource == "services" && r.UserInfo.Username == "system:apiserver"
	}
	if !deleted {
		h.Errorf("no request of the deletion, with the old object: %+v", h.requests("kept"))
	}
}

// What a webhook changes is defaulted, validated and allocated for.
func testHookMutates(h hookTest) {
	h.mutating(h.mutator("a", `[{"op":"add","path":"/metadata/labels","value":{"hooked":"yes"}},`+
		`{"op":"replace","path":"/spec/type","value":"NodePort"}]`))
	var made *corev1.Service
	eventually(h, "a changed Service", func() bool {
		var err error
		made, err = h.service("probe", metav1.DryRunAll)
		return err == nil && made.Labels["hooked"] == "yes"
	})
	made, err := h.service("web")
	h.must(err)
	got, err := h.client.CoreV1().Services(h.ns).Get(h.ctx, "web", metav1.GetOptions{})
	h.must(err)
	if got.Labels["hooked"] != "yes" || got.Spec.Type != corev1.ServiceTypeNodePort || got.Spec.Ports[0].NodePort == 0 ||
		got.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyCluster || got.Spec.ClusterIP != made.Spec.ClusterIP {
		h.Errorf("made %+v, stored %+v", made, got)
	}
	// An answer that is none is a failure.
	_, err = h.client.AdmissionregistrationV1().MutatingWebhookConfigurations().Patch(h.ctx, h.ns, types.JSONPatchType,
		[]byte(`[{"op":"replace","path":"/webhooks/0/clientConfig/url","value":"`+h.URL+`/garbage"}]`), metav1.PatchOptions{})
	h.must(err)
	h.rejected("failed calling webhook")
}

// A webhook that wants it sees what a later one has changed.
func testHookReinvoked(h hookTest) {
	first := h.mutator("a", "labelled")
	first.ReinvocationPolicy = new(admissionv1.IfNeededReinvocationPolicy)
	h.mutating(first, h.mutator("b", `[{"op":"add","path":"/metadata/labels","value":{"second":"yes"}}]`))
	eventually(h, "the first webhook is asked again", func() bool {
		s, err := h.service("probe", metav1.DryRunAll)
		return err == nil && s.Labels["second"] == "yes" && s.Labels["first"] == "saw-it"
	})
}

func testHookDryRun(h hookTest) {
	h.validating("allow")
	h.asks()
	for _, r := range h.requests("probe") {
		if r.DryRun == nil || !*r.DryRun {
			h.Errorf("the webhook is not told of the dry run: %+v", r)
		}
	}
	if _, err := h.service("real"); err != nil {
		h.Fatal(err)
	}
	if asked := h.requests("real"); len(asked) != 1 || *asked[0].DryRun {
		h.Errorf("%+v", asked)
	}
	if _, err := h.client.CoreV1().Services(h.ns).Get(h.ctx, "probe", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		h.Errorf("the dry run made it: %v", err)
	}
}

// Without its server a webhook rejects all or nothing, as it says.
func testHookGone(h hookTest) {
	h.validating("allow")
	h.asks()
	h.Server.Close()
	err := h.rejected(`failed calling webhook "a.example.com": failed to call webhook: Post "` + h.URL)
	if !apierrors.IsInternalError(err) {
		h.Errorf("%v", err)
	}
	_, err = h.client.AdmissionregistrationV1().ValidatingWebhookConfigurations().Patch(h.ctx, h.ns, types.JSONPatchType,
		[]byte(`[{"op":"replace","path":"/webhooks/0/failurePolicy","value":"Ignore"}]`), metav1.PatchOptions{})
	h.must(err)
	eventually(h, "the failure is ignored", func() bool {
		_, err := h.service("probe", metav1.DryRunAll)
		return err == nil
	})
}

func testHookTimeout(h hookTest) {
	h.validating("hang", func(w *admissionv1.ValidatingWebhook) { w.TimeoutSeconds = new(int32(1)) })
	h.rejected(`failed calling webhook "a.example.com": failed to call webhook: Post`)
	began := time.Now()
	_, err := h.service("late")
	if err == nil || !strings.Contains(err.Error(), "context deadline exceeded") || time.Since(began) > waitTimeout {
		h.Errorf("after %s: %v", time.Since(began), err)
	}
}

func testHookConditions(h hookTest) {
	h.validating("reject", func(w *admissionv1.ValidatingWebhook) {
		w.MatchConditions = []admissionv1.MatchCondition{
			{Name: "services", Expression: "request.resource.resource == 'services'"},
			{Name: "not-free", Expression: "object.metadata.name != 'free'"},
			{Name: "may-not", Expression: "!authorizer.group('').resource('pods').namespace('nowhere').check('get').reason().startsWith('x')"},
		}
	})
	h.rejected("not today")
	if _, err := h.service("free"); err != nil {
		h.Errorf("a condition that is not met: %v", err)
	}
	h.configMap("c", nil)
}

// Custom resources go through the same webhooks.
func testHookCustom(h hookTest) {
	c := custom{h.T, h.ctx, h.cfg, nil, h.client}
	c.objs = dynamicOf(h.cfg)
	c.install("testdata/backups.yaml")
	h.mutating(h.mutator("a", `[{"op":"replace","path":"/spec/keep","value":3}]`))
	h.validating("reject", func(w *admissionv1.ValidatingWebhook) {
		w.MatchConditions = []admissionv1.MatchCondition{{Name: "bad", Expression: "object.spec.source == 'bad'"}}
		w.Rules[0].APIGroups = []string{"example.com"}
	})
	in := c.objs.Resource(backups).Namespace(h.ns)
	eventually(h, "a changed Backup", func() bool {
		got, err := in.Create(h.ctx, object(h.T, backup("good", "{source: good}")), metav1.CreateOptions{DryRun: []string{"All"}})
		if err != nil {
			return false
		}
		spec, _ := got.Object["spec"].(map[string]any)
		return spec["keep"] == int64(3) && spec["schedule"] == "daily"
	})
	eventually(h, "a rejected Backup", func() bool {
		_, err := in.Create(h.ctx, object(h.T, backup("bad", "{source: bad}")), metav1.CreateOptions{DryRun: []string{"All"}})
		return err != nil && strings.Contains(err.Error(), "not today")
	})
}

// A webhook for everything, whose server is gone, prevents neither its removal nor
// access reviews.
func testHookExempt(h hookTest) {
	h.Server.Close()
	h.validating("allow", func(w *admissionv1.ValidatingWebhook) {
		w.NamespaceSelector, w.Rules = nil, anything(admissionv1.AllScopes)
	})
	h.rejected("failed calling webhook")
	if _, err := h.client.CoreV1().Namespaces().Create(h.ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "more"}},
		metav1.CreateOptions{}); err == nil {
		h.Error("a namespace was made")
	}
	if !allowed(h.T, h.client, "admin", "get", "pods", "default", "", "system:masters") {
		h.Error("the administrator may do nothing")
	}
	configs := h.client.AdmissionregistrationV1().ValidatingWebhookConfigurations()
	_, err := configs.Patch(h.ctx, h.ns, types.MergePatchType, []byte(`{"metadata":{"labels":{"a":"b"}}}`), metav1.PatchOptions{})
	h.must(err)
	h.must(configs.Delete(h.ctx, h.ns, metav1.DeleteOptions{}))
	eventually(h, "namespaces can be made again", func() bool {
		_, err := h.client.CoreV1().Namespaces().Create(h.ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "more"}},
			metav1.CreateOptions{})
		return err == nil
	})
}

func testHookMetrics(h hookTest) {
	h.validating("reject")
	h.rejected("not today")
	text, err := h.client.RESTClient().Get().AbsPath("/metrics").DoRaw(h.ctx)
	h.must(err)
	for _, want := range []string{
		`apiserver_admission_webhook_rejection_count{error_type="no_error",name="a.example.com",operation="CREATE"`,
		`apiserver_admission_controller_admission_duration_seconds_count{name="ValidatingAdmissionWebhook"`,
		`apiserver_admission_step_admission_duration_seconds_count{operation="CREATE",rejected="false",type="admit"}`,
	} {
		if !strings.Contains(string(text), want) {
			h.Errorf("no metric %s", want)
		}
	}
}
