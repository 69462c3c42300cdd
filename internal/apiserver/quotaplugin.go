package apiserver

import (
	"context"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	quotaadmission "k8s.io/apiserver/pkg/admission/plugin/resourcequota"
	quotaapi "k8s.io/apiserver/pkg/admission/plugin/resourcequota/apis/resourcequota"
	quota "k8s.io/apiserver/pkg/quota/v1"
	"k8s.io/apiserver/pkg/quota/v1/generic"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corev1listers "k8s.io/client-go/listers/core/v1"

	"github.com/fairlead/fairlead/internal/registry/resourcequota"
)

// quotaPlugin enforces quotas by the library's plugin, which takes the kinds whose
// bytes count at its start alone. A kind of custom resources that it does not know
// yet takes the place of that plugin by another one that does; both rely on the
// optimistic writes of the quota's status, and what the former has begun it finishes.
type quotaPlugin struct {
	*admission.Handler
	client  kubernetes.Interface
	shared  informers.SharedInformerFactory
	drained <-chan struct{}
	lister  corev1listers.ResourceQuotaLister

	mu      sync.RWMutex
	kinds   []schema.GroupResource // of custom resources
	current *quotaadmission.QuotaAdmission
	replace chan struct{} // closed when current is replaced
}

var _ admission.ValidationInterface = (*quotaPlugin)(nil)

func newQuotaPlugin(
	client kubernetes.Interface, shared informers.SharedInformerFactory, drained <-chan struct{}, lister corev1listers.ResourceQuotaLister,
) (*quotaPlugin, error) {
	p := &quotaPlugin{Handler: admission.NewHandler(admission.Create, admission.Update), client: client, shared: shared,
		drained: drained, lister: lister}
	return p, p.build(nil)
}

// quotaHandOver is how long a replaced plugin goes on working: longer than a request.
const quotaHandOver = 2 * time.Minute

// build makes the plugin that knows of kinds the current one. p.mu is held, or p is
// not shared yet.
func (p *quotaPlugin) build(kinds []schema.GroupResource) error {
	next, err := quotaadmission.NewResourceQuota(&quotaapi.Configuration{}, quotaWorkers)
	if err != nil {
		return err
	}
	var all []quota.Evaluator
	for _, gvr := range quotaKinds() {
		all = append(all, sizeEvaluator{generic.NewObjectCountEvaluator(gvr.GroupResource(), nil, alias(gvr.GroupResource())), p.lister})
	}
	for _, gr := range kinds {
		all = append(all, sizeEvaluator{generic.NewObjectCountEvaluator(gr, nil, ""), p.lister})
	}
	replaced, stop := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stop)
		select {
		case <-p.drained:
			return
		case <-replaced:
		}
		select { // requests that have taken this one end first
		case <-p.drained:
		case <-time.After(quotaHandOver):
		}
	}()
	next.SetExternalKubeClientSet(p.client)
	next.SetExternalKubeInformerFactory(p.shared)
	next.SetDrainedNotification(stop)
	next.SetQuotaConfiguration(generic.NewConfiguration(all, map[schema.GroupResource]struct{}{
		{Resource: "events"}: {}, {Group: groupEvents, Resource: "events"}: {},
	}))
	if err := next.ValidateInitialization(); err != nil {
		close(replaced)
		return err
	}
	if p.replace != nil {
		close(p.replace)
	}
	p.kinds, p.current, p.replace = kinds, next, replaced
	return nil
}

// Validate rejects what exceeds a quota.
func (p *quotaPlugin) Validate(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	current, err := p.knowing(a)
	if err != nil {
		return apierrors.NewInternalError(err)
	}
	return current.Validate(ctx, a, o)
}

// knowing returns the plugin that knows the kind of a, if its bytes may count.
func (p *quotaPlugin) knowing(a admission.Attributes) (*quotaadmission.QuotaAdmission, error) {
	gr := a.GetResource().GroupResource()
	_, custom := a.GetObject().(*unstructured.Unstructured)
	p.mu.RLock()
	current, known := p.current, slices.Contains(p.kinds, gr)
	p.mu.RUnlock()
	if !custom || known || a.GetNamespace() == "" || !limitsBytes(p.lister, a.GetNamespace()) {
		return current, nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if slices.Contains(p.kinds, gr) {
		return p.current, nil
	}
	err := p.build(append(slices.Clone(p.kinds), gr))
	return p.current, err
}

// quotaPage is how many custom resources are listed at a time.
const quotaPage = 500

// customBytes returns the bytes of the custom resources of a namespace.
func (q *quotas) customBytes(ctx context.Context, namespace string) (int64, error) {
	text, err := q.client.Discovery().RESTClient().Get().AbsPath("/apis/apiextensions.k8s.io/v1/customresourcedefinitions").
		SetHeader("Accept", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1").Do(ctx).Raw()
	var definitions metav1.PartialObjectMetadataList
	if err == nil {
		err = json.Unmarshal(text, &definitions)
	}
	if err != nil {
		return 0, err
	}
	var sum int64
	for i := range definitions.Items {
		resource, group, _ := strings.Cut(definitions.Items[i].Name, ".")
		gvr, err := q.version(ctx, schema.GroupResource{Group: group, Resource: resource})
		if err == nil {
			var n int64
			n, err = q.listedBytes(ctx, resourcePath(gvr, namespace))
			sum += n
		}
		if err != nil && !apierrors.IsNotFound(err) { // not served yet, or not in namespaces
			return 0, err
		}
	}
	return sum, nil
}

// listedBytes returns the bytes of all objects at a path.
func (q *quotas) listedBytes(ctx context.Context, path string) (int64, error) {
	var sum int64
	for next := ""; ; {
		text, err := q.client.Discovery().RESTClient().Get().AbsPath(path).SetHeader("Accept", "application/json").
			Param("limit", strconv.Itoa(quotaPage)).Param("continue", next).Do(ctx).Raw()
		var page struct {
			Metadata metav1.ListMeta   `json:"metadata"`
			Items    []json.RawMessage `json:"items"`
		}
		if err == nil {
			err = json.Unmarshal(text, &page)
		}
		if err != nil {
			return 0, err
		}
		for _, item := range page.Items {
			sum += int64(len(item))
		}
		if next = page.Metadata.Continue; next == "" {
			return sum, nil
		}
	}
}

// limitsBytes reports whether a quota of the namespace limits bytes.
func limitsBytes(lister corev1listers.ResourceQuotaLister, namespace string) bool {
	have, err := lister.ResourceQuotas(namespace).List(labels.Everything())
	return err == nil && slices.ContainsFunc(have, func(r *corev1.ResourceQuota) bool {
		_, ok := r.Spec.Hard[resourcequota.Bytes]
		return ok
	})
}

// defaultQuota is the name of the quota that a namespace gets.
const defaultQuota = "default"

// defaultQuotaAnnotation with the value "none" on a Namespace keeps it without the
// default quota.
const defaultQuotaAnnotation = "fairlead.dev/default-quota"

// added has a namespace that the server sees for the first time limited.
func (q *quotas) added(obj any) {
	if n := obj.(*corev1.Namespace); n.Annotations[defaultQuotaAnnotation] != "none" {
		q.enqueue(q.fresh, n.Name)
	}
}

// limit gives a namespace the quota first, unless it has one or is the system's.
func (q *quotas) limit(ctx context.Context, namespace string) {
	if slices.Contains(systemNamespaces(), namespace) {
		return
	}
	if have, err := q.lister.ResourceQuotas(namespace).List(labels.Everything()); err == nil && len(have) > 0 {
		return
	}
	bounded, cancel := context.WithTimeout(ctx, quotaTimeout)
	defer cancel()
	// What was created with the namespace may not have reached the lister yet.
	have, err := q.client.CoreV1().ResourceQuotas(namespace).List(bounded, metav1.ListOptions{Limit: 1})
	if err == nil && len(have.Items) > 0 {
		return
	}
	if err == nil {
		_, err = q.client.CoreV1().ResourceQuotas(namespace).Create(bounded, &corev1.ResourceQuota{
			ObjectMeta: metav1.ObjectMeta{Name: defaultQuota}, Spec: corev1.ResourceQuotaSpec{Hard: q.first}}, metav1.CreateOptions{})
	}
	switch {
	case err == nil, apierrors.IsAlreadyExists(err), apierrors.IsNotFound(err), ctx.Err() != nil,
		apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
	default:
		q.log.Warn("cannot create the default quota of a namespace; retrying", "namespace", namespace, "err", err)
		q.enqueue(q.fresh, namespace)
	}
}
