package admission

import (
	"context"
	"errors"
	"fmt"
	"slices"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// Authority decides who may let policies read parameters. Policies are evaluated with
// the rights of the server, and may show in their messages what they read.
type Authority struct {
	// Authorizer decides; nil allows everything.
	Authorizer authorizer.UnconditionalAuthorizer
	// Resolve returns the resource of a kind.
	Resolve func(schema.GroupVersionKind) (schema.GroupVersionResource, error)
}

func sameKind(a, b *admissionv1.ParamKind) bool { return equality.Semantic.DeepEqual(a, b) }

func sameParams(a, b *admissionv1.ParamRef) bool { return equality.Semantic.DeepEqual(a, b) }

// mayReadKind asks that the user may read all objects of the kind of a policy's
// parameters.
func (a Authority) mayReadKind(ctx context.Context, kind *admissionv1.ParamKind) field.ErrorList {
	if kind == nil {
		return nil
	}
	ask, _ := a.ask(kind)
	ask.Verb, ask.Name, ask.Namespace = "get", "*", "*"
	u, ok, err := a.allowed(ctx, ask)
	if err == nil && !ok {
		err = fmt.Errorf(`user %s must have "get" permission on all objects of the referenced paramKind (kind=%s, apiVersion=%s)`,
			u, kind.Kind, kind.APIVersion)
	}
	return forbid(field.NewPath("spec", "paramKind"), err)
}

// mayReadParams asks that the user may read the parameters of a binding. kindOf
// returns the kind of the parameters of the named policy.
func (a Authority) mayReadParams(
	ctx context.Context, policy string, ref *admissionv1.ParamRef, kindOf func(context.Context, string) (*admissionv1.ParamKind, error),
) field.ErrorList {
	if ref == nil {
		return nil
	}
	kind, unknown := kindOf(ctx, policy)
	ask, unresolved := a.ask(kind)
	ask.Verb, ask.Name, ask.Namespace = "get", ref.Name, ref.Namespace
	if ref.Name == "" {
		ask.Verb = "list"
	}
	u, ok, err := a.allowed(ctx, ask)
	const all = "to determine minimum required permissions and user %s does not have %q permission for all groups, versions and resources"
	switch {
	case err != nil || ok:
	case unknown != nil:
		err = fmt.Errorf("unable to get policy %s "+all, policy, u, ask.Verb)
	case unresolved != nil:
		err = fmt.Errorf("unable to resolve paramKind %v "+all, kind, u, ask.Verb)
	default:
		err = fmt.Errorf("user %s does not have %q permission on the object referenced by paramRef", u, ask.Verb)
	}
	return forbid(field.NewPath("spec", "paramRef"), err)
}

// ask returns a question about kind; about everything that is not known of it.
func (a Authority) ask(kind *admissionv1.ParamKind) (authorizer.AttributesRecord, error) {
	ask := authorizer.AttributesRecord{ResourceRequest: true, APIGroup: "*", APIVersion: "*", Resource: "*"}
	if kind == nil {
		return ask, nil
	}
	gv, err := schema.ParseGroupVersion(kind.APIVersion)
	if err != nil {
		return ask, err
	}
	ask.APIGroup, ask.APIVersion = gv.Group, gv.Version
	if a.Resolve == nil {
		return ask, nil
	}
	gvr, err := a.Resolve(gv.WithKind(kind.Kind))
	if err == nil {
		ask.Resource = gvr.Resource
	}
	return ask, err
}

// allowed returns the name of the user and whether the user may do it. Members
// of system:masters may do everything.
func (a Authority) allowed(ctx context.Context, ask authorizer.AttributesRecord) (string, bool, error) {
	if a.Authorizer == nil {
		return "", true, nil
	}
	u, ok := request.UserFrom(ctx)
	if !ok {
		return "", false, errors.New("cannot identify user to authorize read access to params")
	}
	if slices.Contains(u.GetGroups(), user.SystemPrivilegedGroup) {
		return u.GetName(), true, nil
	}
	ask.User = u
	d, _, err := a.Authorizer.Authorize(ctx, ask)
	return u.GetName(), d == authorizer.DecisionAllow, err
}

func forbid(path *field.Path, err error) field.ErrorList {
	if err == nil {
		return nil
	}
	return field.ErrorList{field.Forbidden(path, err.Error())}
}
