package admit

import (
	"context"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
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

	"github.com/fairlead/fairlead/internal/apiserver/usage"
	"github.com/fairlead/fairlead/internal/registry/resourcequota"
	"github.com/fairlead/fairlead/internal/svc"
)

// quotaPlugin enforces quotas by the library's plugin, which takes the kinds whose
// bytes count only at its start. A kind of custom resources that it does not know
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

// build makes the plugin that knows of kinds the current one. The caller holds p.mu, or p is
// not shared yet.
func (p *quotaPlugin) build(kinds []schema.GroupResource) error {
	next, err := quotaadmission.NewResourceQuota(&quotaapi.Configuration{}, quotaWorkers)
	if err != nil {
		return err
	}
	var all []quota.Evaluator
	limited := func(namespace string) bool { return limitsBytes(p.lister, namespace) }
	for _, gvr := range append(quotaKinds(), eventsv1.SchemeGroupVersion.WithResource("events")) {
		all = append(all, usage.WithBytes(usage.Evaluator(gvr.GroupResource()), limited))
	}
	for _, gr := range kinds {
		all = append(all, usage.WithBytes(usage.Evaluator(gr), limited))
	}
	// The bytes of quotas do not count: an update of a quota would wait for its own write of the status.
	all = append(all, usage.Evaluator(corev1.Resource("resourcequotas")))
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
	next.SetQuotaConfiguration(generic.NewConfiguration(all, nil))
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

const (
	// kindTimeout bounds the count of one kind of custom resources.
	kindTimeout = 10 * time.Second
	// kindRetry is the time between two tries to count a kind that cannot be listed.
	kindRetry = time.Minute
)

// byteCount is the last count of the bytes of a namespace.
type byteCount struct {
	at    time.Time
	kinds map[string]kindBytes // custom resources, by resource and group
}

// kindBytes is what the last list of a kind came to. While it cannot be listed, such as
// without the webhook that converts it, that goes on to count.
type kindBytes struct {
	sum    int64
	failed time.Time // the last try; zero if it succeeded
}

// customBytes returns the bytes of the custom resources of a namespace.
func (q *Quotas) customBytes(ctx context.Context, namespace string, b *byteCount) (int64, error) {
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
		n, err := q.kindBytes(ctx, namespace, schema.GroupResource{Group: group, Resource: resource}, b)
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

// kindBytes returns the bytes of one kind of custom resources; it fails if they have
// never been counted.
func (q *Quotas) kindBytes(ctx context.Context, namespace string, gr schema.GroupResource, b *byteCount) (int64, error) {
	last, counted := b.kinds[gr.String()]
	if !last.failed.IsZero() && time.Since(last.failed) < kindRetry {
		return last.sum, nil
	}
	bounded, cancel := context.WithTimeout(ctx, kindTimeout)
	defer cancel()
	gvr, err := q.version(bounded, gr)
	var n int64
	if err == nil {
		n, err = q.listedBytes(bounded, resourcePath(gvr, namespace))
	}
	switch {
	case err == nil:
		b.kinds[gr.String()] = kindBytes{sum: n}
		return n, nil
	case apierrors.IsNotFound(err): // not served yet, or not in namespaces
		delete(b.kinds, gr.String())
		return 0, nil
	case !counted || ctx.Err() != nil:
		return 0, err
	case last.failed.IsZero():
		q.log.Warn("cannot count the bytes of a kind for the quotas of a namespace; its last count stands; retrying",
			"namespace", namespace, "kind", gr.String(), "bytes", last.sum, "err", err, "after", kindRetry)
	}
	b.kinds[gr.String()] = kindBytes{sum: last.sum, failed: time.Now()}
	return last.sum, nil
}

// listedBytes returns the bytes of all objects at a path.
func (q *Quotas) listedBytes(ctx context.Context, path string) (int64, error) {
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

// ExemptFromShare returns a function that reports whether the objects of a namespace may take any part of the store: the
// system's may, and others do what their ResourceQuota with resourcequota.Bytes allows.
func ExemptFromShare(lister corev1listers.ResourceQuotaLister) func(namespace string) bool {
	return func(namespace string) bool {
		return slices.Contains(SystemNamespaces(), namespace) || limitsBytes(lister, namespace)
	}
}

// defaultQuota is the name of the quota that a namespace gets.
const defaultQuota = "default"

// added has a namespace that the server sees for the first time limited.
func (q *Quotas) added(obj any) {
	if n := obj.(*corev1.Namespace); n.Annotations[svc.DefaultQuotaAnnotation] != svc.DefaultQuotaNone {
		q.queue.AddAfter(quotaWork{namespace: n.Name, fresh: true}, quotaPause)
	}
}

// limit gives a namespace the quota first, unless it has one or is the system's.
func (q *Quotas) limit(ctx context.Context, namespace string) error {
	if slices.Contains(SystemNamespaces(), namespace) {
		return nil
	}
	if have, err := q.lister.ResourceQuotas(namespace).List(labels.Everything()); err == nil && len(have) > 0 {
		return nil
	}
	bounded, cancel := context.WithTimeout(ctx, quotaTimeout)
	defer cancel()
	// What was created with the namespace may not have reached the lister yet.
	have, err := q.client.CoreV1().ResourceQuotas(namespace).List(bounded, metav1.ListOptions{Limit: 1})
	if err == nil && len(have.Items) > 0 {
		return nil
	}
	if err == nil {
		_, err = q.client.CoreV1().ResourceQuotas(namespace).Create(bounded, &corev1.ResourceQuota{
			ObjectMeta: metav1.ObjectMeta{Name: defaultQuota}, Spec: corev1.ResourceQuotaSpec{Hard: q.first}}, metav1.CreateOptions{})
	}
	if apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return nil
	}
	return err
}
