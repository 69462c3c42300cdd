package admit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corev1listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"github.com/fairlead/fairlead/internal/apiserver/usage"
	"github.com/fairlead/fairlead/internal/registry/resourcequota"
)

const (
	// quotaPause gathers changes before a namespace is counted again.
	quotaPause = 200 * time.Millisecond
	// quotaResync is the time between two counts of every namespace with a quota.
	quotaResync = 30 * time.Second
	// quotaTimeout bounds the count of one quota.
	quotaTimeout = 30 * time.Second
	quotaWorkers = 5
	// quotaCounters is how many namespaces are counted at the same time.
	quotaCounters = 3
	// quotaRetry and quotaMaxRetry bound the time to the next try for a namespace.
	quotaRetry, quotaMaxRetry = time.Second, time.Minute
	// bytesPause is the least time between two counts of the bytes of a namespace, which
	// read all that it holds.
	bytesPause = 10 * time.Second
)

// quotaKinds are the kinds whose sizes count towards resourcequota.Bytes, with the
// versions by which they are listed.
func quotaKinds() []schema.GroupVersionResource {
	core, apps := corev1.SchemeGroupVersion.WithResource, appsv1.SchemeGroupVersion.WithResource
	return []schema.GroupVersionResource{
		core("configmaps"), core("secrets"), core("services"), core("pods"), core("serviceaccounts"), core("endpoints"), core("events"),
		discoveryv1.SchemeGroupVersion.WithResource("endpointslices"), coordinationv1.SchemeGroupVersion.WithResource("leases"),
		networkingv1.SchemeGroupVersion.WithResource("ingresses"),
		apps("deployments"), apps("replicasets"), apps("daemonsets"), apps("controllerrevisions"),
		policyv1.SchemeGroupVersion.WithResource("poddisruptionbudgets"),
		rbacv1.SchemeGroupVersion.WithResource("roles"), rbacv1.SchemeGroupVersion.WithResource("rolebindings"),
	}
}

// Quotas counts what namespaces with a ResourceQuota hold. As a plugin of admission
// it learns where something is deleted, or begins to use less.
type Quotas struct {
	*admission.Handler
	client kubernetes.Interface
	lister corev1listers.ResourceQuotaLister
	synced cache.InformerSynced // of lister
	first  corev1.ResourceList  // of a new namespace; may be nil
	log    *slog.Logger

	queue workqueue.TypedRateLimitingInterface[quotaWork]

	mu     sync.Mutex
	counts map[string]*byteCount // by namespace; one is used by one worker at a time
}

// quotaWork is a namespace to be counted, or a fresh one that may lack the quota first.
type quotaWork struct {
	namespace string
	fresh     bool
}

var _ admission.ValidationInterface = (*Quotas)(nil)

// NewQuotas returns the counter and the plugin that enforces quotas, which works
// until drained is closed. Namespaces without a quota get one with the limits first,
// if there are any.
func NewQuotas(
	client kubernetes.Interface, shared informers.SharedInformerFactory, drained <-chan struct{}, first corev1.ResourceList, log *slog.Logger,
) (*Quotas, admission.Interface, error) {
	informer := shared.Core().V1().ResourceQuotas()
	q := &Quotas{Handler: admission.NewHandler(admission.Delete, admission.Update), client: client, lister: informer.Lister(),
		first: first, log: log,
		synced: informer.Informer().HasSynced, counts: map[string]*byteCount{}, queue: workqueue.NewTypedRateLimitingQueue(
			workqueue.NewTypedItemExponentialFailureRateLimiter[quotaWork](quotaRetry, quotaMaxRetry))}
	_, err := informer.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) { q.mark(obj.(*corev1.ResourceQuota).Namespace) },
		UpdateFunc: func(_, obj any) {
			if r := obj.(*corev1.ResourceQuota); !equality.Semantic.DeepEqual(r.Spec.Hard, r.Status.Hard) {
				q.mark(r.Namespace)
			}
		},
	})
	if err != nil {
		return nil, nil, err
	}
	if len(first) > 0 {
		_, err := shared.Core().V1().Namespaces().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: q.added,
		})
		if err != nil {
			return nil, nil, err
		}
	}
	plugin, err := newQuotaPlugin(client, shared, drained, q.lister)
	return q, plugin, err
}

// Validate accepts everything. The namespace is counted again where something is deleted or uses less.
func (q *Quotas) Validate(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetOperation() == admission.Update && !usage.Frees(a) {
		return nil
	}
	if ns := a.GetNamespace(); ns != "" && !a.IsDryRun() {
		if have, err := q.lister.ResourceQuotas(ns).List(labels.Everything()); err == nil && len(have) > 0 {
			q.mark(ns)
		}
	}
	return nil
}

// mark has a namespace counted.
func (q *Quotas) mark(namespace string) {
	q.queue.AddAfter(quotaWork{namespace: namespace}, quotaPause)
}

// Run counts until ctx ends.
func (q *Quotas) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	defer q.queue.ShutDown()
	if !cache.WaitForCacheSync(ctx.Done(), q.synced) {
		return
	}
	for range quotaCounters {
		wg.Go(func() {
			for q.next(ctx) {
			}
		})
	}
	resync := time.NewTicker(quotaResync)
	defer resync.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-resync.C:
		}
		list, err := q.lister.List(labels.Everything())
		if err != nil {
			continue // cannot happen: the lister reads from memory
		}
		for _, r := range list {
			if work := (quotaWork{namespace: r.Namespace}); q.queue.NumRequeues(work) == 0 { // else it has its own time
				q.queue.Add(work)
			}
		}
	}
}

// next does what is first in the queue, and reports whether there may be more.
func (q *Quotas) next(ctx context.Context) bool {
	work, end := q.queue.Get()
	if end {
		return false
	}
	defer q.queue.Done(work)
	what, err := "cannot count what the quotas of a namespace limit; retrying", error(nil)
	if work.fresh {
		what = "cannot create the default quota of a namespace; retrying"
		err = q.limit(ctx, work.namespace)
	} else {
		err = q.sync(ctx, work.namespace)
	}
	if err == nil || ctx.Err() != nil {
		q.queue.Forget(work)
		return true
	}
	if q.queue.NumRequeues(work) == 0 && !apierrors.IsConflict(err) {
		q.log.Warn(what, "namespace", work.namespace, "err", err)
	}
	q.queue.AddRateLimited(work)
	return true
}

// sync sets the status of the quotas of a namespace.
func (q *Quotas) sync(ctx context.Context, namespace string) error {
	have, err := q.lister.ResourceQuotas(namespace).List(labels.Everything())
	if err != nil {
		return err
	}
	q.mu.Lock()
	b := q.counts[namespace]
	if len(have) == 0 {
		delete(q.counts, namespace)
	} else if b == nil {
		b = &byteCount{kinds: map[string]kindBytes{}}
		q.counts[namespace] = b
	}
	q.mu.Unlock()
	var errs []error
	due := b == nil || time.Since(b.at) >= bytesPause
	for _, r := range have {
		if err := q.syncQuota(ctx, namespace, r.Name, b, due); err != nil && !apierrors.IsNotFound(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// syncQuota sets the status of one quota; bytes are counted if that is due, or they never
// were. A request that is admitted at the same time changes it too, and the write is a conflict.
func (q *Quotas) syncQuota(ctx context.Context, namespace, name string, b *byteCount, due bool) error {
	ctx, cancel := context.WithTimeout(ctx, quotaTimeout)
	defer cancel()
	r, err := q.client.CoreV1().ResourceQuotas(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	status := corev1.ResourceQuotaStatus{Hard: r.Spec.Hard, Used: corev1.ResourceList{}}
	var failed error
	t := &tally{q: q, quota: r, bytes: b, sums: map[schema.GroupVersionResource]corev1.ResourceList{}}
	for name := range r.Spec.Hard {
		if !resourcequota.Counted(name) {
			continue
		}
		used, known := r.Status.Used[name]
		if known && name == resourcequota.Bytes && !due {
			status.Used[name] = used // with what was admitted since the count
			q.queue.AddAfter(quotaWork{namespace: namespace}, bytesPause-time.Since(b.at))
			continue
		}
		n, err := t.measure(ctx, name)
		switch {
		case err == nil:
			status.Used[name] = n
		case known && ctx.Err() == nil: // the others are counted
			status.Used[name], failed = used, err
		default:
			return err
		}
	}
	if equality.Semantic.DeepEqual(status, r.Status) {
		return failed
	}
	r.Status = status
	if _, err = q.client.CoreV1().ResourceQuotas(namespace).UpdateStatus(ctx, r, metav1.UpdateOptions{}); err != nil {
		return err
	}
	return failed
}

// tally is one count for one quota. It lists a kind once for all resources.
type tally struct {
	q     *Quotas
	quota *corev1.ResourceQuota
	bytes *byteCount
	sums  map[schema.GroupVersionResource]corev1.ResourceList // of kinds that were listed
}

// measure returns how much of the resource name the objects use that the quota selects.
func (t *tally) measure(ctx context.Context, name corev1.ResourceName) (resource.Quantity, error) {
	n, err := int64(0), error(nil)
	counted, scoped := resourcequota.CountOf(name), usage.Scoped(t.quota)
	switch {
	case name == resourcequota.Bytes:
		n, err = t.q.measureBytes(ctx, t.quota.Namespace, t.bytes)
	case resourcequota.OfPods(name) && (scoped || name != resourcequota.CountPods):
		return t.listed(ctx, corev1.SchemeGroupVersion.WithResource("pods"), name)
	case scoped: // no scope selects other objects
	case resourcequota.OfServices(name):
		return t.listed(ctx, corev1.SchemeGroupVersion.WithResource("services"), name)
	case counted != "":
		n, err = t.q.count(ctx, t.quota.Namespace, schema.ParseGroupResource(counted))
	}
	return *resource.NewQuantity(n, resource.DecimalSI), err
}

// listed returns how much of the resource name the selected objects of a kind use.
func (t *tally) listed(ctx context.Context, gvr schema.GroupVersionResource, name corev1.ResourceName) (resource.Quantity, error) {
	sum, ok := t.sums[gvr]
	if !ok {
		list, err := t.q.list(ctx, t.quota.Namespace, gvr)
		if err == nil {
			sum, err = usage.Sum(t.quota, gvr.GroupResource(), list)
		}
		if err != nil {
			return resource.Quantity{}, err
		}
		t.sums[gvr] = sum
	}
	return sum[name], nil
}

// list returns the objects of a kind in a namespace.
func (q *Quotas) list(ctx context.Context, namespace string, gvr schema.GroupVersionResource) ([]runtime.Object, error) {
	list, err := q.client.CoreV1().RESTClient().Get().AbsPath(resourcePath(gvr, namespace)).Do(ctx).Get()
	if err != nil {
		return nil, err
	}
	return meta.ExtractList(list)
}

// measureBytes returns the bytes of all objects of a namespace.
func (q *Quotas) measureBytes(ctx context.Context, namespace string, b *byteCount) (int64, error) {
	var sum int64
	for _, gvr := range quotaKinds() {
		list, err := q.list(ctx, namespace, gvr)
		if err != nil {
			return 0, err
		}
		for _, o := range list {
			sum += usage.Size(o)
		}
	}
	custom, err := q.customBytes(ctx, namespace, b)
	if err == nil {
		b.at = time.Now()
	}
	return sum + custom, err
}

// version returns a resource with the preferred version of its group; the error is
// NotFound for a group that does not exist.
func (q *Quotas) version(ctx context.Context, gr schema.GroupResource) (schema.GroupVersionResource, error) {
	if gr.Group == "" {
		return gr.WithVersion("v1"), nil
	}
	text, err := q.client.Discovery().RESTClient().Get().AbsPath("/apis/"+gr.Group).SetHeader("Accept", "application/json").Do(ctx).Raw()
	var g metav1.APIGroup
	if err == nil {
		err = json.Unmarshal(text, &g)
	}
	return gr.WithVersion(g.PreferredVersion.Version), err
}

// count asks for one object, and how many there are beyond.
func (q *Quotas) count(ctx context.Context, namespace string, gr schema.GroupResource) (int64, error) {
	gvr, err := q.version(ctx, gr)
	if apierrors.IsNotFound(err) {
		return 0, nil // the kind does not exist yet
	}
	if err != nil {
		return 0, err
	}
	text, err := q.client.Discovery().RESTClient().Get().AbsPath(resourcePath(gvr, namespace)).Param("limit", "1").
		SetHeader("Accept", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1").Do(ctx).Raw()
	if apierrors.IsNotFound(err) {
		return 0, nil
	}
	var list metav1.PartialObjectMetadataList
	if err == nil {
		err = json.Unmarshal(text, &list)
	}
	if err != nil {
		return 0, err
	}
	n := int64(len(list.Items))
	if list.RemainingItemCount != nil {
		n += *list.RemainingItemCount
	}
	return n, nil
}

func resourcePath(gvr schema.GroupVersionResource, namespace string) string {
	if gvr.Group == "" {
		return fmt.Sprintf("/api/%s/namespaces/%s/%s", gvr.Version, namespace, gvr.Resource)
	}
	return fmt.Sprintf("/apis/%s/%s/namespaces/%s/%s", gvr.Group, gvr.Version, namespace, gvr.Resource)
}
