package accounts

import (
	"context"
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"github.com/fairlead/fairlead/internal/loop"
)

// keepTimeout bounds the work on one namespace; keepWorkers is the number of
// workers.
const (
	keepTimeout = 30 * time.Second
	keepWorkers = 4
)

// Keeper ensures that every namespace has the account "default" and the ConfigMap
// kube-root-ca.crt.
type Keeper struct {
	client     kubernetes.Interface
	authority  func() []byte
	log        *slog.Logger
	namespaces corelisters.NamespaceLister
	accounts   corelisters.ServiceAccountLister
	configs    corelisters.ConfigMapLister
	rootCAs    informers.SharedInformerFactory // only of the ConfigMaps
	informers  []cache.SharedIndexInformer
	queue      workqueue.TypedRateLimitingInterface[string]
	failures   loop.Failures
}

// NewKeeper returns a Keeper over the informers of f, which the caller starts.
// authority returns the certificates of the trusted authorities as PEM.
func NewKeeper(client kubernetes.Interface, f informers.SharedInformerFactory, authority func() []byte, log *slog.Logger) *Keeper {
	// Only the ConfigMaps of the one name are watched.
	rootCAs := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("metadata.name", RootConfigMap).String()
	}))
	core := f.Core().V1()
	configs := rootCAs.Core().V1().ConfigMaps()
	return &Keeper{
		client: client, authority: authority, log: log, rootCAs: rootCAs,
		namespaces: core.Namespaces().Lister(), accounts: core.ServiceAccounts().Lister(), configs: configs.Lister(),
		informers: []cache.SharedIndexInformer{core.Namespaces().Informer(), core.ServiceAccounts().Informer(), configs.Informer()},
		queue: workqueue.NewTypedRateLimitingQueue(
			workqueue.NewTypedItemExponentialFailureRateLimiter[string](20*time.Millisecond, 30*time.Second)),
	}
}

// Run works until ctx ends.
func (k *Keeper) Run(ctx context.Context) {
	enqueue := func(o any) {
		if d, ok := o.(cache.DeletedFinalStateUnknown); ok {
			o = d.Obj
		}
		switch o := o.(type) {
		case *corev1.Namespace:
			k.queue.Add(o.Name)
		case *corev1.ServiceAccount:
			if o.Name == DefaultAccount {
				k.queue.Add(o.Namespace)
			}
		case *corev1.ConfigMap:
			k.queue.Add(o.Namespace)
		}
	}
	for _, i := range k.informers {
		h, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: enqueue, UpdateFunc: func(_, o any) { enqueue(o) }, DeleteFunc: enqueue,
		})
		if err != nil {
			return // the informer has ended, and so has the server
		}
		defer func() { _ = i.RemoveEventHandler(h) }()
	}
	k.rootCAs.StartWithContext(ctx)
	defer k.rootCAs.Shutdown()
	var workers sync.WaitGroup
	for range keepWorkers {
		workers.Go(func() {
			for k.next(ctx) {
			}
		})
	}
	<-ctx.Done()
	k.queue.ShutDown()
	workers.Wait()
}

// Refresh has all namespaces get the present authorities.
func (k *Keeper) Refresh() {
	all, err := k.namespaces.List(labels.Everything())
	if err != nil {
		return // cannot happen: the lister reads from memory
	}
	for _, ns := range all {
		k.queue.Add(ns.Name)
	}
}

func (k *Keeper) next(ctx context.Context) bool {
	namespace, stop := k.queue.Get()
	if stop {
		return false
	}
	defer k.queue.Done(namespace)
	bounded, cancel := context.WithTimeout(ctx, keepTimeout)
	defer cancel()
	if err := k.keep(bounded, namespace); err != nil && ctx.Err() == nil {
		k.failures.Log(k.log, k.queue.NumRequeues(namespace), err, "cannot create a namespace's default account; retrying",
			"namespace", namespace)
		k.queue.AddRateLimited(namespace)
		return true
	}
	k.queue.Forget(namespace)
	return true
}

// keep creates the missing objects of a namespace according to the caches; what exists
// already fails with AlreadyExists.
func (k *Keeper) keep(ctx context.Context, namespace string) error {
	ns, err := k.namespaces.Get(namespace)
	if apierrors.IsNotFound(err) || err == nil && (ns.DeletionTimestamp != nil || ns.Status.Phase == corev1.NamespaceTerminating) {
		return nil
	}
	if err != nil {
		return err
	}
	if _, err := k.accounts.ServiceAccounts(namespace).Get(DefaultAccount); apierrors.IsNotFound(err) {
		_, err := k.client.CoreV1().ServiceAccounts(namespace).Create(ctx,
			&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: DefaultAccount}}, metav1.CreateOptions{})
		if ignore(err) != nil {
			return err
		}
	}
	return k.keepConfig(ctx, namespace)
}

func (k *Keeper) keepConfig(ctx context.Context, namespace string) error {
	api, key := k.client.CoreV1().ConfigMaps(namespace), corev1.ServiceAccountRootCAKey
	data := map[string]string{key: string(k.authority())}
	have, err := k.configs.ConfigMaps(namespace).Get(RootConfigMap)
	switch {
	case apierrors.IsNotFound(err):
		_, err = api.Create(ctx, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: RootConfigMap, Annotations: map[string]string{
				"kubernetes.io/description": "The certificate of the cluster's authority, which verifies the API server from inside Pods. " +
					"It is written by the server.",
			}},
			Data: data,
		}, metav1.CreateOptions{})
		return ignore(err)
	case err != nil:
		return err
	case len(have.Data) == 1 && have.Data[key] == data[key]:
		return nil
	}
	have = have.DeepCopy()
	have.Data, have.BinaryData = data, nil
	_, err = api.Update(ctx, have, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		return nil // the event of its deletion follows
	}
	return err
}

// ignore returns nil for errors that mean that another writer was faster or that the
// namespace is being deleted.
func ignore(err error) error {
	if apierrors.IsAlreadyExists(err) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
