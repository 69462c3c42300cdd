package serviceaccount

import (
	"context"
	"fmt"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/audit"
	apiserviceaccount "k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
)

// The life of a token, in seconds.
const (
	defaultExpiration = int64(3600)
	minExpiration     = int64(600)
	maxExpiration     = int64(1) << 32
)

// Issuer signs tokens.
type Issuer interface {
	// Issue signs c for life from now; id names the token.
	Issue(c Claims, now time.Time, life time.Duration) (token, id string, err error)
	// DefaultAudiences are the audiences of a token that asks for none.
	DefaultAudiences() []string
}

// Claims are what a token says.
type Claims struct {
	Audiences []string
	bound     Bound
}

// Bound is the claim "kubernetes.io": the account, and what the token ends
// with.
type Bound struct {
	Namespace      string `json:"namespace,omitempty"`
	ServiceAccount *Ref   `json:"serviceaccount,omitempty"`
	Pod            *Ref   `json:"pod,omitempty"`
	Secret         *Ref   `json:"secret,omitempty"`
	Node           *Ref   `json:"node,omitempty"`
}

// Ref names one object for good.
type Ref struct {
	Name string `json:"name,omitempty"`
	UID  string `json:"uid,omitempty"`
}

// Subject is the user name of the account.
func (c Claims) Subject() string {
	return apiserviceaccount.MakeUsername(c.bound.Namespace, c.bound.ServiceAccount.Name)
}

// Bound is what the token is bound to.
func (c Claims) Bound() Bound { return c.bound }

// TokenOptions is what serviceaccounts/token needs.
type TokenOptions struct {
	Issuer Issuer
	// MaxLife shortens tokens that ask for more; zero does not.
	MaxLife time.Duration
	// Pods, Secrets and Nodes find the object to which a token is bound.
	Pods, Secrets, Nodes rest.Getter
}

// tokenREST is serviceaccounts/token: a TokenRequest is answered with a token.
type tokenREST struct {
	accounts rest.Getter
	o        TokenOptions
}

var (
	_ rest.NamedCreater             = (*tokenREST)(nil)
	_ rest.GroupVersionKindProvider = (*tokenREST)(nil)
)

// NewToken returns the storage of the subresource.
func NewToken(accounts rest.Getter, o TokenOptions) rest.Storage { return &tokenREST{accounts, o} }

func (*tokenREST) New() runtime.Object { return &authenticationv1.TokenRequest{} }
func (*tokenREST) Destroy()            {}

// GroupVersionKind is the kind of the subresource, which is of another group.
func (*tokenREST) GroupVersionKind(schema.GroupVersion) schema.GroupVersionKind {
	return authenticationv1.SchemeGroupVersion.WithKind("TokenRequest")
}

// Create signs a token for the named account.
func (r *tokenREST) Create(ctx context.Context, name string, obj runtime.Object, validate rest.ValidateObjectFunc,
	o *metav1.CreateOptions) (runtime.Object, error) {
	t, ok := obj.(*authenticationv1.TokenRequest)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("not a TokenRequest: %T", obj))
	}
	found, err := r.accounts.Get(ctx, name, &metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	account := found.(*corev1.ServiceAccount)
	namespace := request.NamespaceValue(ctx)
	if t.Name == "" {
		t.Name = name
	}
	if t.Namespace == "" {
		t.Namespace = namespace
	}
	switch {
	case t.Name != name:
		return nil, apierrors.NewBadRequest(fmt.Sprintf("metadata.name: %q is not the account %q of the request", t.Name, name))
	case t.Namespace != namespace:
		return nil, apierrors.NewBadRequest(fmt.Sprintf("metadata.namespace: %q is not the namespace %q of the request", t.Namespace, namespace))
	}
	if len(t.Spec.Audiences) == 0 {
		t.Spec.Audiences = r.o.Issuer.DefaultAudiences()
	}
	if t.Spec.ExpirationSeconds == nil {
		seconds := defaultExpiration
		t.Spec.ExpirationSeconds = &seconds
	}
	t.Status = authenticationv1.TokenRequestStatus{}
	if validate != nil {
		if err := validate(ctx, obj.DeepCopyObject()); err != nil {
			return nil, err
		}
	}
	if errs := validateToken(t); len(errs) > 0 {
		return nil, apierrors.NewInvalid(schema.GroupKind{Group: authenticationv1.GroupName, Kind: "TokenRequest"}, name, errs)
	}
	bound := Bound{Namespace: namespace, ServiceAccount: &Ref{account.Name, string(account.UID)}}
	if ref := t.Spec.BoundObjectRef; ref != nil {
		if err := r.bind(ctx, &bound, ref); err != nil {
			return nil, err
		}
	}
	life := time.Duration(*t.Spec.ExpirationSeconds) * time.Second
	if r.o.MaxLife > 0 && life > r.o.MaxLife {
		life = r.o.MaxLife
	}
	seconds := int64(life / time.Second)
	t.Spec.ExpirationSeconds = &seconds
	if len(o.DryRun) > 0 {
		return t, nil
	}
	now := time.Now()
	token, id, err := r.o.Issuer.Issue(Claims{t.Spec.Audiences, bound}, now, life)
	if err != nil {
		return nil, apierrors.NewInternalError(fmt.Errorf("cannot sign a token: %w", err))
	}
	audit.AddAuditAnnotation(ctx, apiserviceaccount.IssuedCredentialIDAuditAnnotationKey, "JTI="+id)
	t.Status = authenticationv1.TokenRequestStatus{Token: token, ExpirationTimestamp: metav1.Time{Time: now.Add(life)}}
	return t, nil
}

// bind finds what the token shall end with.
func (r *tokenREST) bind(ctx context.Context, b *Bound, ref *authenticationv1.BoundObjectReference) error {
	kind := ref.APIVersion + "/" + ref.Kind
	getters := map[string]rest.Getter{"v1/Pod": r.o.Pods, "v1/Secret": r.o.Secrets, "v1/Node": r.o.Nodes}
	getter := getters[kind]
	if getter == nil {
		return apierrors.NewBadRequest(fmt.Sprintf("cannot bind token for serviceaccount to type %s; there are v1/Pod, v1/Secret and v1/Node",
			kind))
	}
	if ref.Kind == "Node" {
		ctx = request.WithNamespace(ctx, metav1.NamespaceNone)
	}
	obj, err := getter.Get(ctx, ref.Name, &metav1.GetOptions{})
	if err != nil {
		return err
	}
	m := obj.(metav1.Object)
	resource := map[string]string{"Pod": "pods", "Secret": "secrets", "Node": "nodes"}[ref.Kind]
	if ref.UID != "" && ref.UID != m.GetUID() {
		return apierrors.NewConflict(corev1.Resource(resource), ref.Name,
			fmt.Errorf("the UID in the bound object reference (%s) does not match the UID in record. "+
				"The object might have been deleted and then recreated", ref.UID))
	}
	to := &Ref{m.GetName(), string(m.GetUID())}
	switch o := obj.(type) {
	case *corev1.Secret:
		b.Secret = to
	case *corev1.Node:
		b.Node = to
	case *corev1.Pod:
		if o.Spec.ServiceAccountName != b.ServiceAccount.Name {
			return apierrors.NewBadRequest(fmt.Sprintf("cannot bind token for serviceaccount %q to pod running with different serviceaccount name",
				b.ServiceAccount.Name))
		}
		b.Pod = to
		if o.Spec.NodeName != "" {
			b.Node = &Ref{Name: o.Spec.NodeName}
			if n, err := r.o.Nodes.Get(request.WithNamespace(ctx, metav1.NamespaceNone), o.Spec.NodeName, &metav1.GetOptions{}); err == nil {
				b.Node.UID = string(n.(metav1.Object).GetUID())
			}
		}
	}
	return nil
}

func validateToken(t *authenticationv1.TokenRequest) (errs field.ErrorList) {
	spec := field.NewPath("spec")
	if s := *t.Spec.ExpirationSeconds; s < minExpiration {
		errs = append(errs, field.Invalid(spec.Child("expirationSeconds"), s, "may not specify a duration less than 10 minutes"))
	} else if s > maxExpiration {
		errs = append(errs, field.TooLong(spec.Child("expirationSeconds"), s, int(maxExpiration)))
	}
	if ref := t.Spec.BoundObjectRef; ref != nil && ref.Name == "" {
		errs = append(errs, field.Required(spec.Child("boundObjectRef", "name"), "a token is bound to one object"))
	}
	for i, a := range t.Spec.Audiences {
		if a == "" {
			errs = append(errs, field.Invalid(spec.Child("audiences").Index(i), a, "an audience is not empty"))
		}
	}
	return errs
}
