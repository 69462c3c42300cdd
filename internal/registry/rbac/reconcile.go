package rbac

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/component-helpers/auth/rbac/reconciliation"
)

// reconcileAtOnce bounds the writes under way.
const reconcileAtOnce = 8

// Policy is roles and bindings that shall exist.
type Policy struct {
	ClusterRoles        []rbacv1.ClusterRole
	ClusterRoleBindings []rbacv1.ClusterRoleBinding
	Roles               []rbacv1.Role
	RoleBindings        []rbacv1.RoleBinding
}

// Reconcile makes what p names and adds to existing ones the rules and
// subjects that it lacks. What others added stays, and what carries the
// annotation rbac.authorization.kubernetes.io/autoupdate=false is not changed.
func Reconcile(ctx context.Context, client kubernetes.Interface, p Policy) error {
	api := client.RbacV1()
	roles, err := api.ClusterRoles().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	bindings, err := api.ClusterRoleBindings().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	var work errgroup.Group
	work.SetLimit(reconcileAtOnce)
	haveRole := map[string]*rbacv1.ClusterRole{}
	for i := range roles.Items {
		haveRole[roles.Items[i].Name] = &roles.Items[i]
	}
	for i := range p.ClusterRoles {
		role := &p.ClusterRoles[i]
		work.Go(func() error {
			o := reconciliation.ReconcileRoleOptions{
				Role:   reconciliation.ClusterRoleRuleOwner{ClusterRole: role},
				Client: knownRole{reconciliation.ClusterRoleModifier{Client: api.ClusterRoles()}, haveRole}, Confirm: true,
			}
			_, err := o.Run()
			return about("ClusterRole", role.Name, err)
		})
	}
	haveBinding := map[string]*rbacv1.ClusterRoleBinding{}
	for i := range bindings.Items {
		haveBinding[bindings.Items[i].Name] = &bindings.Items[i]
	}
	for i := range p.ClusterRoleBindings {
		b := &p.ClusterRoleBindings[i]
		work.Go(func() error {
			o := reconciliation.ReconcileRoleBindingOptions{
				RoleBinding: reconciliation.ClusterRoleBindingAdapter{ClusterRoleBinding: b},
				Client:      knownBinding{reconciliation.ClusterRoleBindingClientAdapter{Client: api.ClusterRoleBindings()}, haveBinding},
				Confirm:     true,
			}
			_, err := o.Run()
			return about("ClusterRoleBinding", b.Name, err)
		})
	}
	for i := range p.Roles {
		role := &p.Roles[i]
		work.Go(func() error {
			o := reconciliation.ReconcileRoleOptions{
				Role:   reconciliation.RoleRuleOwner{Role: role},
				Client: reconciliation.RoleModifier{Client: api, NamespaceClient: client.CoreV1().Namespaces()}, Confirm: true,
			}
			_, err := o.Run()
			return about("Role", role.Namespace+"/"+role.Name, err)
		})
	}
	for i := range p.RoleBindings {
		b := &p.RoleBindings[i]
		work.Go(func() error {
			o := reconciliation.ReconcileRoleBindingOptions{
				RoleBinding: reconciliation.RoleBindingAdapter{RoleBinding: b},
				Client:      reconciliation.RoleBindingClientAdapter{Client: api, NamespaceClient: client.CoreV1().Namespaces()}, Confirm: true,
			}
			_, err := o.Run()
			return about("RoleBinding", b.Namespace+"/"+b.Name, err)
		})
	}
	return work.Wait()
}

func about(kind, name string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %s: %w", kind, name, err)
}

// knownRole reads roles from a list, which saves a request for each at every
// start.
type knownRole struct {
	reconciliation.ClusterRoleModifier
	have map[string]*rbacv1.ClusterRole
}

func (k knownRole) Get(_, name string) (reconciliation.RuleOwner, error) {
	if r := k.have[name]; r != nil {
		return reconciliation.ClusterRoleRuleOwner{ClusterRole: r}, nil
	}
	return nil, apierrors.NewNotFound(rbacv1.Resource("clusterroles"), name)
}

// knownBinding is knownRole for bindings.
type knownBinding struct {
	reconciliation.ClusterRoleBindingClientAdapter
	have map[string]*rbacv1.ClusterRoleBinding
}

func (k knownBinding) Get(_, name string) (reconciliation.RoleBinding, error) {
	if b := k.have[name]; b != nil {
		return reconciliation.ClusterRoleBindingAdapter{ClusterRoleBinding: b}, nil
	}
	return nil, apierrors.NewNotFound(rbacv1.Resource("clusterrolebindings"), name)
}
