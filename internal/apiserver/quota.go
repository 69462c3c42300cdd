package apiserver

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	quota "k8s.io/apiserver/pkg/quota/v1"
	"k8s.io/apiserver/pkg/quota/v1/generic"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corev1listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

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
)

// quotaKinds are the kinds whose sizes count towards resourcequota.Bytes, with the
// versions by which they are listed.
func quotaKinds() []schema.GroupVersionResource {
	return []schema.GroupVersionResource{
		{Version: "v1", Resource: "configmaps"}, {Version: "v1", Resource: "secrets"}, {Version: "v1", Resource: "services"},
		{Version: "v1", Resource: "pods"}, {Version: "v1", Resource: "serviceaccounts"}, {Version: "v1", Resource: "endpoints"},
		{Group: groupDiscovery, Version: "v1", Resource: "endpointslices"}, {Group: groupCoordination, Version: "v1", Resource: "leases"},
		{Group: groupNetworking, Version: "v1", Resource: "ingresses"},
		{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "roles"},
		{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "rolebindings"},
	}
}

// quotas counts what namespaces with a ResourceQuota hold. As a plugin of admission
// it learns where something is deleted.
type quotas struct {
	*admission.Handler
	client kubernetes.Interface
	lister corev1listers.ResourceQuotaLister
	synced cache.InformerSynced // of lister
	first  corev1.ResourceList  // of a new namespace; may be nil
	log    *slog.Logger

	mu    sync.Mutex
	dirty map[string]bool // namespaces
	fresh map[string]bool // namespaces that may lack the quota first
	wake  chan struct{}
}

var _ admission.ValidationInterface = (*quotas)(nil)

// newQuotas returns the counter and the plugin that enforces quotas, which works
// until drained is closed. Namespaces without a quota get one with the limits first,
// if there are any.
func newQuotas(
	client kubernetes.Interface, shared informers.SharedInformerFactory, drained <-chan struct{}, first corev1.ResourceList, log *slog.Logger,
) (*quotas, admission.Interface, error) {
	informer := shared.Core().V1().ResourceQuotas()
	q := &quotas{Handler: admission.NewHandler(admission.Delete), client: client, lister: informer.Lister(), first: first, log: log,
		synced: informer.Informer().HasSynced,
		dirty:  map[string]bool{}, fresh: map[string]bool{}, wake: make(chan struct{}, 1)}
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

// alias returns the name without count/ that some kinds have besides.
func alias(gr schema.GroupResource) corev1.ResourceName {
	if name := corev1.ResourceName(gr.Resource); gr.Group == "" && resourcequota.Counted(name) {
		return name
	}
	return ""
}

// Validate accepts every deletion; its namespace is counted again.
func (q *quotas) Validate(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if ns := a.GetNamespace(); ns != "" && !a.IsDryRun() {
		if have, err := q.lister.ResourceQuotas(ns).List(labels.Everything()); err == nil && len(have) > 0 {
			q.mark(ns)
		}
	}
	return nil
}

// mark has a namespace counted.
func (q *quotas) mark(namespace string) { q.enqueue(q.dirty, namespace) }

// enqueue adds a namespace to a set of q and wakes run.
func (q *quotas) enqueue(set map[string]bool, namespace string) {
	q.mu.Lock()
	set[namespace] = true
	q.mu.Unlock()
	select {
	case q.wake <- struct{}{}:
	default: // it is awake
	}
}

// run counts until ctx ends.
func (q *quotas) run(ctx context.Context) {
	if !cache.WaitForCacheSync(ctx.Done(), q.synced) {
		return
	}
	resync := time.NewTicker(quotaResync)
	defer resync.Stop()
	for {
		all := false
		select {
		case <-ctx.Done():
			return
		case <-resync.C:
			all = true
		case <-q.wake:
			select {
			case <-ctx.Done():
				return
			case <-time.After(quotaPause):
			}
		}
		q.mu.Lock()
		dirty, fresh := maps.Clone(q.dirty), maps.Clone(q.fresh)
		clear(q.dirty)
		clear(q.fresh)
		q.mu.Unlock()
		for namespace := range fresh {
			q.limit(ctx, namespace)
		}
		list, err := q.lister.List(labels.Everything())
		if err != nil {
			continue // cannot happen: the lister reads from memory
		}
		for _, r := range list {
			if !all && !dirty[r.Namespace] {
				continue
			}
			if err := q.sync(ctx, r.Namespace, r.Name); err != nil && ctx.Err() == nil && !apierrors.IsNotFound(err) {
				if !apierrors.IsConflict(err) {
					q.log.Warn("cannot count what a ResourceQuota limits; retrying", "namespace", r.Namespace, "quota", r.Name, "err", err)
				}
				q.mark(r.Namespace)
			}
		}
	}
}

// sync sets the status of one quota. Whoever is admitted meanwhile changes it too,
// and the write is a conflict.
func (q *quotas) sync(ctx context.Context, namespace, name string) error {
	ctx, cancel := context.WithTimeout(ctx, quotaTimeout)
	defer cancel()
	r, err := q.client.CoreV1().ResourceQuotas(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	status := corev1.ResourceQuotaStatus{Hard: r.Spec.Hard, Used: corev1.ResourceList{}}
	for name := range r.Spec.Hard {
		if !resourcequota.Counted(name) {
			continue
		}
		n, err := q.measure(ctx, namespace, name)
		if err != nil {
			return err
		}
		status.Used[name] = *resource.NewQuantity(n, resource.DecimalSI)
	}
	if equality.Semantic.DeepEqual(status, r.Status) {
		return nil
	}
	r.Status = status
	_, err = q.client.CoreV1().ResourceQuotas(namespace).UpdateStatus(ctx, r, metav1.UpdateOptions{})
	return err
}

// measure returns how much of the resource name the namespace holds.
func (q *quotas) measure(ctx context.Context, namespace string, name corev1.ResourceName) (int64, error) {
	if name != resourcequota.Bytes {
		counted, _ := strings.CutPrefix(string(name), "count/")
		return q.count(ctx, namespace, schema.ParseGroupResource(counted))
	}
	var sum int64
	for _, gvr := range quotaKinds() {
		list, err := q.client.CoreV1().RESTClient().Get().AbsPath(resourcePath(gvr, namespace)).Do(ctx).Get()
		if err != nil {
			return 0, err
		}
		err = meta.EachListItem(list, func(o runtime.Object) error { sum += sizeOf(o); return nil })
		if err != nil {
			return 0, err
		}
	}
	custom, err := q.customBytes(ctx, namespace)
	return sum + custom, err
}

// version returns a resource with the preferred version of its group; the error is
// NotFound for a group that does not exist.
func (q *quotas) version(ctx context.Context, gr schema.GroupResource) (schema.GroupVersionResource, error) {
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
func (q *quotas) count(ctx context.Context, namespace string, gr schema.GroupResource) (int64, error) {
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

// sizeOf returns the size of an object as it is stored, in bytes.
func sizeOf(o runtime.Object) int64 {
	switch o := o.(type) {
	case interface{ Size() int }: // built-in kinds: protobuf
		return int64(o.Size())
	case *unstructured.Unstructured: // custom resources: JSON
		text, err := o.MarshalJSON()
		if err != nil {
			return 0 // cannot happen: it was decoded from JSON
		}
		return int64(len(text))
	}
	return 0
}

// sizeEvaluator counts the objects of a kind, and their bytes.
type sizeEvaluator struct {
	quota.Evaluator
	lister corev1listers.ResourceQuotaLister
}

// Handles reports whether a may need more of a quota: updates do if bytes are
// limited.
func (e sizeEvaluator) Handles(a admission.Attributes) bool {
	if a.GetSubresource() != "" || a.GetOperation() != admission.Update {
		return e.Evaluator.Handles(a)
	}
	return limitsBytes(e.lister, a.GetNamespace())
}

// MatchingResources returns the resources of input that the kind uses.
func (e sizeEvaluator) MatchingResources(input []corev1.ResourceName) []corev1.ResourceName {
	return append(e.Evaluator.MatchingResources(input), quota.Intersection(input, []corev1.ResourceName{resourcequota.Bytes})...)
}

// Matches reports whether r limits objects of the kind.
func (e sizeEvaluator) Matches(r *corev1.ResourceQuota, item runtime.Object) (bool, error) {
	return generic.Matches(r, item, e.MatchingResources, generic.MatchesNoScopeFunc)
}

// Usage returns one object and its bytes.
func (e sizeEvaluator) Usage(item runtime.Object) (corev1.ResourceList, error) {
	used, err := e.Evaluator.Usage(item)
	if err == nil {
		used[resourcequota.Bytes] = *resource.NewQuantity(sizeOf(item), resource.DecimalSI)
	}
	return used, err
}
