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
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
)

// keepTimeout bounds the work on one namespace, keepWorkers how many are
// worked on at once.
const (
	keepTimeout = 30 * time.Second
	keepWorkers = 4
)

// Keeper sees to it that every namespace has the account "default" and the
// ConfigMap kube-root-ca.crt.
type Keeper struct {
	client     kubernetes.Interface
	authority  string
	log        *slog.Logger
	namespaces corelisters.NamespaceLister
	accounts   corelisters.ServiceAccountLister
	configs    corelisters.ConfigMapLister
	narrow     informers.SharedInformerFactory
	informers  []cache.SharedIndexInformer
	queue      workqueue.TypedRateLimitingInterface[string]
}

// NewKeeper returns a Keeper over the informers of f, which the caller starts.
// authority is the certificate as PEM.
func NewKeeper(client kubernetes.Interface, f informers.SharedInformerFactory, authority []byte, log *slog.Logger) *Keeper {
	// Of ConfigMaps only those of the one name are followed.
	narrow := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("metadata.name", RootConfigMap).String()
	}))
	core := f.Core().V1()
	configs := narrow.Core().V1().ConfigMaps()
	return &Keeper{
		client: client, authority: string(authority), log: log, narrow: narrow,
		namespaces: core.Namespaces().Lister(), accounts: core.ServiceAccounts().Lister(), configs: configs.Lister(),
		informers: []cache.SharedIndexInformer{core.Namespaces().Informer(), core.ServiceAccounts().Informer(), configs.Informer()},
		queue: workqueue.NewTypedRateLimitingQueue(
			workqueue.NewTypedItemExponentialFailureRateLimiter[string](20*time.Millisecond, 30*time.Second)),
	}
}

// Run works until ctx ends.
func (k *Keeper) Run(ctx context.Context) {
	look := func(o any) {
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
			AddFunc: look, UpdateFunc: func(_, o any) { look(o) }, DeleteFunc: look,
		})
		if err != nil {
			return // the informer has ended, and so has the server
		}
		defer func() { _ = i.RemoveEventHandler(h) }()
	}
	k.narrow.StartWithContext(ctx)
	defer k.narrow.Shutdown()
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

func (k *Keeper) next(ctx context.Context) bool {
	namespace, stop := k.queue.Get()
	if stop {
		return false
	}
	defer k.queue.Done(namespace)
	bounded, cancel := context.WithTimeout(ctx, keepTimeout)
	defer cancel()
	if err := k.keep(bounded, namespace); err != nil && ctx.Err() == nil {
		k.log.Debug("will see to a namespace's account again", "namespace", namespace, "err", err)
		k.queue.AddRateLimited(namespace)
		return true
	}
	k.queue.Forget(namespace)
	return true
}

// keep makes what is missing. What the caches do not know yet is found out by
// the attempt to make it.
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
	api := k.client.CoreV1().ConfigMaps(namespace)
	data := map[string]string{corev1.ServiceAccountRootCAKey: k.authority}
	have, err := k.configs.ConfigMaps(namespace).Get(RootConfigMap)
	switch {
	case apierrors.IsNotFound(err):
		_, err = api.Create(ctx, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: RootConfigMap, Annotations: map[string]string{
				"kubernetes.io/description": "The certificate of the cluster's authority, by which the API server is recognised from inside " +
					"Pods. It is written by the server.",
			}},
			Data: data,
		}, metav1.CreateOptions{})
		return ignore(err)
	case err != nil:
		return err
	case len(have.Data) == 1 && have.Data[corev1.ServiceAccountRootCAKey] == k.authority:
		return nil
	}
	have = have.DeepCopy()
	have.Data, have.BinaryData = data, nil
	_, err = api.Update(ctx, have, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		return nil // its deletion comes as an event
	}
	return err
}

// ignore takes it that somebody else was faster, or that the namespace goes.
func ignore(err error) error {
	if apierrors.IsAlreadyExists(err) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
