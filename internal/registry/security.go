package registry

import (
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"github.com/fairlead/fairlead/internal/registry/admission"
	"github.com/fairlead/fairlead/internal/registry/certificate"
	"github.com/fairlead/fairlead/internal/registry/rbac"
	"github.com/fairlead/fairlead/internal/registry/review"
	"github.com/fairlead/fairlead/internal/registry/serviceaccount"
)

// Security decides for the storages who may do what.
type Security struct {
	// Authorizer decides requests, Rules are the roles it decides by.
	Authorizer authorizer.Authorizer
	Rules      *rbac.Resolver
	// Reviews answers who may do what, and whose a token is.
	Reviews review.Answers
	// Tokens signs the tokens of ServiceAccounts, for MaxTokenLife at most if
	// that is not zero.
	Tokens       serviceaccount.Issuer
	MaxTokenLife time.Duration
	// Resolve returns the resource of a kind that is served.
	Resolve func(schema.GroupVersionKind) (schema.GroupVersionResource, error)
}

func (s *Storage) addSecurity(o Options) error {
	roles, err := rbac.NewStorage(o.RESTOptions, rbac.Authority{Authorizer: o.Security.Authorizer, Rules: o.Security.Rules})
	if err != nil {
		return err
	}
	s.add(rbacv1.SchemeGroupVersion, roles)
	certificates, err := certificate.NewStorage(o.RESTOptions, o.Security.Authorizer)
	if err != nil {
		return err
	}
	s.add(certificatesv1.SchemeGroupVersion, certificates)
	hooks, err := admission.NewStorage(o.RESTOptions, admission.Authority{Authorizer: o.Security.Authorizer, Resolve: o.Security.Resolve})
	if err != nil {
		return err
	}
	s.add(admissionv1.SchemeGroupVersion, hooks)
	s.add(authorizationv1.SchemeGroupVersion, review.NewAuthorizationStorage(o.Security.Reviews))
	s.add(authenticationv1.SchemeGroupVersion, review.NewAuthenticationStorage(o.Security.Reviews))
	return nil
}
