// Package review answers questions of who one is and what one may do: the
// reviews of authorization.k8s.io and authentication.k8s.io. Nothing of them is
// stored.
package review

import (
	"context"
	"errors"
	"fmt"
	"slices"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
)

// Answers is who knows the answers.
type Answers struct {
	Authorizer authorizer.UnconditionalAuthorizer
	Rules      authorizer.RuleResolver
	// Tokens recognises bearer tokens; Audiences are those a TokenReview is
	// for when it names none.
	Tokens    authenticator.Token
	Audiences authenticator.Audiences
}

// NewAuthorizationStorage returns the reviews of authorization.k8s.io by
// resource path.
func NewAuthorizationStorage(a Answers) map[string]rest.Storage {
	return map[string]rest.Storage{
		"subjectaccessreviews": &creater{
			"subjectaccessreview", false, func() runtime.Object { return &authorizationv1.SubjectAccessReview{} }, a.subjectAccess,
		},
		"localsubjectaccessreviews": &creater{
			"localsubjectaccessreview", true, func() runtime.Object { return &authorizationv1.LocalSubjectAccessReview{} }, a.localSubjectAccess,
		},
		"selfsubjectaccessreviews": &creater{
			"selfsubjectaccessreview", false, func() runtime.Object { return &authorizationv1.SelfSubjectAccessReview{} }, a.selfSubjectAccess,
		},
		"selfsubjectrulesreviews": &creater{
			"selfsubjectrulesreview", false, func() runtime.Object { return &authorizationv1.SelfSubjectRulesReview{} }, a.selfSubjectRules,
		},
	}
}

// NewAuthenticationStorage returns the reviews of authentication.k8s.io by
// resource path.
func NewAuthenticationStorage(a Answers) map[string]rest.Storage {
	return map[string]rest.Storage{
		"tokenreviews": &creater{
			"tokenreview", false, func() runtime.Object { return &authenticationv1.TokenReview{} }, a.token,
		},
		"selfsubjectreviews": &creater{
			"selfsubjectreview", false, func() runtime.Object { return &authenticationv1.SelfSubjectReview{} }, a.selfSubject,
		},
	}
}

// creater is a kind that can be created and nothing else: the answer is the
// object that comes back.
type creater struct {
	singular   string
	namespaced bool
	make       func() runtime.Object
	// answer checks obj, calls validate, and fills in the status.
	answer func(ctx context.Context, obj runtime.Object, validate func() error) (runtime.Object, error)
}

var (
	_ rest.Creater              = (*creater)(nil)
	_ rest.Scoper               = (*creater)(nil)
	_ rest.SingularNameProvider = (*creater)(nil)
)

func (c *creater) New() runtime.Object     { return c.make() }
func (*creater) Destroy()                  {}
func (c *creater) NamespaceScoped() bool   { return c.namespaced }
func (c *creater) GetSingularName() string { return c.singular }

// Create answers.
func (c *creater) Create(ctx context.Context, obj runtime.Object, validate rest.ValidateObjectFunc,
	_ *metav1.CreateOptions) (runtime.Object, error) {
	return c.answer(ctx, obj, func() error {
		if validate == nil {
			return nil
		}
		return validate(ctx, obj.DeepCopyObject())
	})
}

func (a Answers) subjectAccess(ctx context.Context, obj runtime.Object, validate func() error) (runtime.Object, error) {
	r := obj.(*authorizationv1.SubjectAccessReview)
	if errs := append(validateSubject(r.Spec), validateEmptyMeta(r.ObjectMeta, "")...); len(errs) > 0 {
		return nil, apierrors.NewInvalid(authorizationv1.SchemeGroupVersion.WithKind("SubjectAccessReview").GroupKind(), "", errs)
	}
	if err := validate(); err != nil {
		return nil, err
	}
	r.Status = a.decide(ctx, subjectOf(r.Spec), r.Spec.ResourceAttributes, r.Spec.NonResourceAttributes)
	return r, nil
}

func (a Answers) localSubjectAccess(ctx context.Context, obj runtime.Object, validate func() error) (runtime.Object, error) {
	r := obj.(*authorizationv1.LocalSubjectAccessReview)
	if r.Namespace == "" {
		r.Namespace = request.NamespaceValue(ctx)
	}
	if errs := validateLocal(r); len(errs) > 0 {
		return nil, apierrors.NewInvalid(authorizationv1.SchemeGroupVersion.WithKind("LocalSubjectAccessReview").GroupKind(), "", errs)
	}
	if ns := request.NamespaceValue(ctx); r.Namespace != ns {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("namespace on request (%s) does not match the namespace of the review (%s)", ns,
			r.Namespace))
	}
	if err := validate(); err != nil {
		return nil, err
	}
	r.Status = a.decide(ctx, subjectOf(r.Spec), r.Spec.ResourceAttributes, r.Spec.NonResourceAttributes)
	return r, nil
}

func (a Answers) selfSubjectAccess(ctx context.Context, obj runtime.Object, validate func() error) (runtime.Object, error) {
	r := obj.(*authorizationv1.SelfSubjectAccessReview)
	errs := append(validateAttributes(r.Spec.ResourceAttributes, r.Spec.NonResourceAttributes), validateEmptyMeta(r.ObjectMeta, "")...)
	if len(errs) > 0 {
		return nil, apierrors.NewInvalid(authorizationv1.SchemeGroupVersion.WithKind("SelfSubjectAccessReview").GroupKind(), "", errs)
	}
	u, ok := request.UserFrom(ctx)
	if !ok {
		return nil, apierrors.NewBadRequest("no user present on request")
	}
	if err := validate(); err != nil {
		return nil, err
	}
	r.Status = a.decide(ctx, u, r.Spec.ResourceAttributes, r.Spec.NonResourceAttributes)
	return r, nil
}

func (a Answers) selfSubjectRules(ctx context.Context, obj runtime.Object, validate func() error) (runtime.Object, error) {
	r := obj.(*authorizationv1.SelfSubjectRulesReview)
	u, ok := request.UserFrom(ctx)
	if !ok {
		return nil, apierrors.NewBadRequest("no user present on request")
	}
	if r.Spec.Namespace == "" {
		return nil, apierrors.NewBadRequest("no namespace on request")
	}
	if err := validate(); err != nil {
		return nil, err
	}
	resources, urls, incomplete, err := a.Rules.RulesFor(ctx, u, r.Spec.Namespace)
	out := &authorizationv1.SelfSubjectRulesReview{Status: authorizationv1.SubjectRulesReviewStatus{
		ResourceRules: []authorizationv1.ResourceRule{}, NonResourceRules: []authorizationv1.NonResourceRule{}, Incomplete: incomplete,
	}}
	for _, i := range resources {
		out.Status.ResourceRules = append(out.Status.ResourceRules, authorizationv1.ResourceRule{
			Verbs: i.GetVerbs(), APIGroups: i.GetAPIGroups(), Resources: i.GetResources(), ResourceNames: i.GetResourceNames(),
		})
	}
	for _, i := range urls {
		out.Status.NonResourceRules = append(out.Status.NonResourceRules,
			authorizationv1.NonResourceRule{Verbs: i.GetVerbs(), NonResourceURLs: i.GetNonResourceURLs()})
	}
	if err != nil {
		out.Status.EvaluationError = err.Error()
	}
	return out, nil
}

func (a Answers) token(ctx context.Context, obj runtime.Object, validate func() error) (runtime.Object, error) {
	r := obj.(*authenticationv1.TokenReview)
	if r.Namespace != "" {
		return nil, apierrors.NewBadRequest("namespace is not allowed on this type: " + r.Namespace)
	}
	if r.Spec.Token == "" {
		return nil, apierrors.NewBadRequest("token is required for TokenReview in authentication")
	}
	if err := validate(); err != nil {
		return nil, err
	}
	wanted := a.Audiences
	if len(r.Spec.Audiences) > 0 {
		wanted = r.Spec.Audiences
	}
	if len(wanted) > 0 {
		ctx = authenticator.WithAudiences(ctx, wanted)
	}
	got, ok, err := a.Tokens.AuthenticateToken(ctx, r.Spec.Token)
	r.Status = authenticationv1.TokenReviewStatus{Authenticated: ok}
	switch {
	case err != nil:
		r.Status.Authenticated, r.Status.Error = false, err.Error()
	case ok && len(wanted) > 0 && len(wanted.Intersect(got.Audiences)) == 0 && len(got.Audiences) > 0:
		return nil, apierrors.NewInternalError(errors.New("the token is for other audiences than those asked for"))
	case ok:
		r.Status.Audiences = got.Audiences
		r.Status.User = authenticated(userInfo(got.User))
	}
	return r, nil
}

func (Answers) selfSubject(ctx context.Context, obj runtime.Object, validate func() error) (runtime.Object, error) {
	u, ok := request.UserFrom(ctx)
	if !ok {
		return nil, apierrors.NewBadRequest("no user present on request")
	}
	if err := validate(); err != nil {
		return nil, err
	}
	r := obj.(*authenticationv1.SelfSubjectReview)
	r.Status.UserInfo = userInfo(u)
	return r, nil
}

// authenticated adds the group of all authenticated users, which the server adds to who sends a request.
func authenticated(u authenticationv1.UserInfo) authenticationv1.UserInfo {
	known := func(group string) bool { return slices.Contains(u.Groups, group) }
	if u.Username != user.Anonymous && !known(user.AllAuthenticated) && !known(user.AllUnauthenticated) {
		u.Groups = append(slices.Clone(u.Groups), user.AllAuthenticated)
	}
	return u
}
