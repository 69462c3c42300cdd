package access

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/fairlead/fairlead/internal/apiserver/join"
)

// removedTimeout bounds a request about the record of a removed Node, removedSweep is the time between two looks for
// records that are no longer needed.
const (
	removedTimeout = 10 * time.Second
	removedSweep   = time.Hour
)

// removedNodes records the identity of each Node that is deleted, before it is: the certificates of its machine must
// not register it again. A record counts only while the identity has no Node: a deletion may fail after it.
type removedNodes struct {
	*admission.Handler
	client   kubernetes.Interface
	informer cache.SharedIndexInformer
	nodes    nodeIndex
	open     openRequests
	// own returns the node in this process, "" if there is none: its certificate lies beside the key of the authority.
	own func() string
}

func newRemovedNodes(client kubernetes.Interface, nodes coreinformers.NodeInformer, own func() string) (*removedNodes, error) {
	informer := coreinformers.NewFilteredConfigMapInformer(client, join.RemovedNamespace, 0, cache.Indexers{},
		func(o *metav1.ListOptions) { o.LabelSelector = join.RemovedSelector() })
	r := &removedNodes{Handler: admission.NewHandler(admission.Delete), client: client, informer: informer,
		nodes: nodeIndex{nodes.Lister()}, own: own}
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: func(obj any) {
		if m, ok := obj.(*corev1.ConfigMap); ok {
			r.open.end(m.Name)
		}
	}})
	// The record comes before the deletion, and in between the node may have begun further requests.
	_, deleted := nodes.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{DeleteFunc: func(obj any) {
		if last, ok := obj.(cache.DeletedFinalStateUnknown); ok {
			obj = last.Obj
		}
		if n, ok := obj.(*corev1.Node); ok {
			r.open.end(join.RemovedName(n.Name, n.Annotations[nodeIdentity]))
		}
	}})
	return r, errors.Join(err, deleted)
}

// openRequests are the requests of nodes that this server answers now. The zero value has none.
type openRequests struct {
	mu sync.Mutex
	// of has what ends each request of an identity, by join.RemovedName.
	of map[string]map[*http.Request]context.CancelFunc
}

// begin returns a request that ends by end, until done is called.
func (o *openRequests) begin(name string, r *http.Request) (bounded *http.Request, done func()) {
	ctx, cancel := context.WithCancel(r.Context())
	bounded = r.WithContext(ctx)
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.of[name] == nil {
		if o.of == nil {
			o.of = map[string]map[*http.Request]context.CancelFunc{}
		}
		o.of[name] = map[*http.Request]context.CancelFunc{}
	}
	o.of[name][bounded] = cancel
	return bounded, func() {
		cancel()
		o.mu.Lock()
		defer o.mu.Unlock()
		if delete(o.of[name], bounded); len(o.of[name]) == 0 {
			delete(o.of, name)
		}
	}
}

// end ends all requests of an identity.
func (o *openRequests) end(name string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, cancel := range o.of[name] {
		cancel()
	}
}

// endOpen returns next, where the requests of a node, which are authorized, end when its Node is deleted: a watch would else
// go on for as long as its client likes.
func (r *removedNodes) endOpen(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		u, _ := request.UserFrom(req.Context())
		if u == nil {
			next.ServeHTTP(w, req)
			return
		}
		node, ok := NodeOf(u)
		if !ok {
			next.ServeHTTP(w, req)
			return
		}
		bounded, done := r.open.begin(join.RemovedName(node, u.GetUID()), req)
		defer done()
		// It may have been deleted after the request was authorized.
		if n, err := r.nodes.Get(node); r.has(node, u) && (err != nil || !r.mayAct(n, u)) {
			r.open.end(join.RemovedName(node, u.GetUID()))
		}
		next.ServeHTTP(w, bounded)
	})
}

// run follows the records until ctx ends.
func (r *removedNodes) run(ctx context.Context) { r.informer.RunWithContext(ctx) }

// has reports whether there is a record of the identity of u for a node, as far as the watch has shown. The start of a
// server does not wait for the watch, which a damaged ConfigMap can keep from beginning: registrations ask the store (check).
func (r *removedNodes) has(node string, u user.Info) bool {
	_, found, err := r.informer.GetIndexer().GetByKey(join.RemovedNamespace + "/" + join.RemovedName(node, u.GetUID()))
	return err == nil && found
}

// check returns an error if there is a record of the identity of u for a node, or if that is not known.
func (r *removedNodes) check(ctx context.Context, node string, u user.Info) error {
	ctx, cancel := context.WithTimeout(ctx, removedTimeout)
	defer cancel()
	_, err := r.client.CoreV1().ConfigMaps(join.RemovedNamespace).Get(ctx, join.RemovedName(node, u.GetUID()), metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("cannot find out whether Node %s was removed: %w", node, err)
	}
	return errRemoved(node)
}

// errRemoved is the error of a machine whose Node was deleted.
func errRemoved(node string) error {
	return fmt.Errorf("node %s was removed from the cluster: an administrator lets this machine back with 'fairlead node admit %[1]s', "+
		"or it joins anew with a new token and without its old data directory", node)
}

// mayAct reports whether u may act for its Node n. A Node that is being deleted does not count. One that no machine
// has registered is not for a machine that was removed.
func (r *removedNodes) mayAct(n *corev1.Node, u user.Info) bool {
	if n.DeletionTimestamp != nil {
		return false
	}
	id := n.Annotations[nodeIdentity]
	return id == u.GetUID() && id != "" || id == "" && !r.has(n.Name, u)
}

var _ admission.ValidationInterface = (*removedNodes)(nil)

// Validate records the identity of a Node that is to be deleted. It is the last check before the deletion, which it
// rejects if the record cannot be written.
func (r *removedNodes) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	res := a.GetResource()
	n, ok := a.GetOldObject().(*corev1.Node)
	if res.Group != "" || res.Resource != "nodes" || a.GetSubresource() != "" || a.IsDryRun() || !ok || n == nil || !registered(n) {
		return nil
	}
	id := n.Annotations[nodeIdentity]
	if id == "" && n.Name == r.own() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, removedTimeout)
	defer cancel()
	record := join.Removed{Node: n.Name, Identity: id, By: a.GetUserInfo().GetName(), At: time.Now()}
	_, err := r.client.CoreV1().ConfigMaps(join.RemovedNamespace).Create(ctx, record.Object(), metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("cannot record that the certificates of node %s no longer count, so its Node stays: %w", n.Name, err)
	}
	return nil
}

// sweep deletes records of certificates that have ended, until ctx ends.
func (r *removedNodes) sweep(ctx context.Context, log *slog.Logger) {
	ticker := time.NewTicker(removedSweep)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		for _, obj := range r.informer.GetIndexer().List() {
			m, ok := obj.(*corev1.ConfigMap)
			if !ok {
				continue
			}
			if record, err := join.ReadRemoved(m); err != nil || !record.Outdated(time.Now()) {
				continue
			}
			bounded, cancel := context.WithTimeout(ctx, removedTimeout)
			err := r.client.CoreV1().ConfigMaps(m.Namespace).Delete(bounded, m.Name, metav1.DeleteOptions{
				Preconditions: &metav1.Preconditions{UID: &m.UID}})
			cancel()
			if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) && ctx.Err() == nil {
				log.Warn("cannot delete the record of a removed Node; retrying", "configmap", m.Name, "err", err, "after", removedSweep)
			}
		}
	}
}
