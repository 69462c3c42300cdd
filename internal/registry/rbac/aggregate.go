package rbac

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	rbaclisters "k8s.io/client-go/listers/rbac/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"github.com/fairlead/fairlead/internal/loop"
)

// aggregateTimeout bounds the writing of one role.
const aggregateTimeout = 30 * time.Second

// Aggregator keeps the rules of ClusterRoles with an aggregationRule: the rules of
// all ClusterRoles that its selectors select.
type Aggregator struct {
	client   kubernetes.Interface
	roles    rbaclisters.ClusterRoleLister
	informer cache.SharedIndexInformer
	log      *slog.Logger
}

// NewAggregator returns an Aggregator over the informers of f, which the
// caller starts.
func NewAggregator(client kubernetes.Interface, f informers.SharedInformerFactory, log *slog.Logger) *Aggregator {
	roles := f.Rbac().V1().ClusterRoles()
	return &Aggregator{client: client, roles: roles.Lister(), informer: roles.Informer(), log: log}
}

// Run works until ctx ends.
func (a *Aggregator) Run(ctx context.Context) {
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[string](5*time.Millisecond,
		30*time.Second))
	// Whatever changes may be a part of any of them; there are few.
	all := func(any) {
		roles, err := a.roles.List(labels.Everything())
		if err != nil {
			return // a lister of memory does not fail
		}
		for _, r := range roles {
			if aggregates(r) {
				queue.Add(r.Name)
			}
		}
	}
	handle, err := a.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: all, UpdateFunc: func(_, o any) { all(o) }, DeleteFunc: all,
	})
	if err != nil {
		return // the informer has ended, and so has the server
	}
	defer func() { _ = a.informer.RemoveEventHandler(handle) }()
	if !cache.WaitForCacheSync(ctx.Done(), handle.HasSynced) {
		queue.ShutDown()
		return
	}
	var failures loop.Failures
	var worker sync.WaitGroup
	worker.Go(func() {
		for {
			name, stop := queue.Get()
			if stop {
				return
			}
			if err := a.sync(ctx, name); err != nil && ctx.Err() == nil {
				failures.Log(a.log, queue.NumRequeues(name), err, "cannot aggregate a ClusterRole; retrying", "clusterrole", name)
				queue.AddRateLimited(name)
			} else {
				queue.Forget(name)
			}
			queue.Done(name)
		}
	})
	<-ctx.Done()
	queue.ShutDown()
	worker.Wait()
}

func (a *Aggregator) sync(ctx context.Context, name string) error {
	role, err := a.roles.Get(name)
	if apierrors.IsNotFound(err) || err == nil && !aggregates(role) {
		return nil
	}
	if err != nil {
		return err
	}
	all, err := a.roles.List(labels.Everything())
	if err != nil {
		return err
	}
	rules, err := gather(role, all)
	if err != nil {
		return err
	}
	if equality.Semantic.DeepEqual(role.Rules, rules) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, aggregateTimeout)
	defer cancel()
	role = role.DeepCopy()
	role.Rules = rules
	_, err = a.client.RbacV1().ClusterRoles().Update(ctx, role, metav1.UpdateOptions{FieldManager: "clusterrole-aggregation-controller"})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// gather returns the rules of all that role's selectors select, in the order
// of the roles' names, each once.
func gather(role *rbacv1.ClusterRole, all []*rbacv1.ClusterRole) ([]rbacv1.PolicyRule, error) {
	all = slices.Clone(all)
	slices.SortFunc(all, func(a, b *rbacv1.ClusterRole) int { return cmp.Compare(a.Name, b.Name) })
	var rules []rbacv1.PolicyRule
	for i := range role.AggregationRule.ClusterRoleSelectors {
		selector, err := metav1.LabelSelectorAsSelector(&role.AggregationRule.ClusterRoleSelectors[i])
		if err != nil {
			return nil, fmt.Errorf("aggregationRule of %s: %w", role.Name, err)
		}
		for _, r := range all {
			if r.Name == role.Name || !selector.Matches(labels.Set(r.Labels)) {
				continue
			}
			for _, rule := range r.Rules {
				if !slices.ContainsFunc(rules, func(have rbacv1.PolicyRule) bool { return equality.Semantic.DeepEqual(have, rule) }) {
					rules = append(rules, *rule.DeepCopy())
				}
			}
		}
	}
	return rules, nil
}
