// Package certificate stores CertificateSigningRequests: how a new node gets a
// certificate, and how people may ask for client certificates.
package certificate

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	apirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// NewStorage returns the storages by resource path. a decides who may
// approve requests for a signer, and who may sign them.
func NewStorage(opts generic.RESTOptionsGetter, a authorizer.UnconditionalAuthorizer) (map[string]rest.Storage, error) {
	base := rules()
	r, err := store.New(store.Kind{
		Resource: certificatesv1.Resource("certificatesigningrequests"), Singular: "certificatesigningrequest", ShortNames: []string{"csr"},
		New:      store.Empty[certificatesv1.CertificateSigningRequest],
		NewList:  store.Empty[certificatesv1.CertificateSigningRequestList],
		Strategy: base.Strategy(),
		Attrs:    attrs,
		Table: store.NewTable([]store.Column{
			{Name: "Age"}, {Name: "SignerName"}, {Name: "Requestor"}, {Name: "RequestedDuration"}, {Name: "Condition"},
		}, cells),
	}, opts)
	if err != nil {
		return nil, err
	}
	return map[string]rest.Storage{
		"certificatesigningrequests":          r,
		"certificatesigningrequests/status":   &checked{store.NewSub(r, statusRules(base).Strategy()), a, "sign"},
		"certificatesigningrequests/approval": &checked{store.NewSub(r, approvalRules(base).Strategy()), a, "approve"},
	}, nil
}

// AddToScheme adds what the kind needs beyond its types.
func AddToScheme(s *runtime.Scheme) error {
	return store.AddFieldLabels(s, certificatesv1.SchemeGroupVersion.WithKind("CertificateSigningRequest"), "spec.signerName")
}

func attrs(obj runtime.Object) (labels.Set, fields.Set, error) {
	c := obj.(*certificatesv1.CertificateSigningRequest)
	return c.Labels, fields.Set{"metadata.name": c.Name, "spec.signerName": c.Spec.SignerName}, nil
}

func cells(c *certificatesv1.CertificateSigningRequest) []any {
	wanted := ""
	if s := c.Spec.ExpirationSeconds; s != nil {
		wanted = duration.HumanDuration(time.Duration(*s) * time.Second)
	}
	state := "Pending"
	switch {
	case Has(c, certificatesv1.CertificateDenied):
		state = "Denied"
	case Has(c, certificatesv1.CertificateApproved):
		state = "Approved"
	}
	if Has(c, certificatesv1.CertificateFailed) {
		state += ",Failed"
	}
	if len(c.Status.Certificate) > 0 {
		state += ",Issued"
	}
	return []any{store.Age(c.CreationTimestamp), store.OrNone(c.Spec.SignerName), c.Spec.Username, store.OrNone(wanted), state}
}

// Has reports whether c has a condition of type t.
func Has(c *certificatesv1.CertificateSigningRequest, t certificatesv1.RequestConditionType) bool {
	return slices.ContainsFunc(c.Status.Conditions, func(k certificatesv1.CertificateSigningRequestCondition) bool {
		return k.Type == t && k.Status != corev1.ConditionFalse
	})
}

// Parse reads the request that c carries and checks its signature.
func Parse(c *certificatesv1.CertificateSigningRequest) (*x509.CertificateRequest, error) {
	block, _ := pem.Decode(c.Spec.Request)
	if block == nil || block.Type != "CERTIFICATE REQUEST" {
		return nil, errors.New("PEM block type must be CERTIFICATE REQUEST")
	}
	r, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, err
	}
	return r, r.CheckSignature()
}

type request = *certificatesv1.CertificateSigningRequest

func keptSpec() store.Part[request] {
	return store.Field("spec", func(c request) *certificatesv1.CertificateSigningRequestSpec { return &c.Spec })
}

// rules accept changes of the metadata only.
func rules() store.Rules[request] {
	return store.Rules[request]{
		APIVersion: certificatesv1.SchemeGroupVersion.String(), ClusterScoped: true,
		Kept: []store.Part[request]{
			keptSpec(), store.Field("status", func(c request) *certificatesv1.CertificateSigningRequestStatus { return &c.Status }),
		},
		KeptOnUpdateOnly: true,
		Create:           setRequester,
		Validate:         validateWrite(false, false),
	}
}

// setRequester records who asks. A request is never created approved.
func setRequester(ctx context.Context, c request) {
	c.Status = certificatesv1.CertificateSigningRequestStatus{}
	s := &c.Spec
	s.Username, s.UID, s.Groups, s.Extra = "", "", nil, nil
	u, ok := apirequest.UserFrom(ctx)
	if !ok {
		return
	}
	s.Username, s.UID, s.Groups = u.GetName(), u.GetUID(), u.GetGroups()
	for k, v := range u.GetExtra() {
		if s.Extra == nil {
			s.Extra = map[string]certificatesv1.ExtraValue{}
		}
		s.Extra[k] = v
	}
}

// statusRules accept the certificate, and conditions other than the approval.
func statusRules(r store.Rules[request]) store.Rules[request] {
	status := r.Sub(validateWrite(false, true), keptSpec())
	status.Update = stamp
	return status
}

// approvalRules accept conditions.
func approvalRules(r store.Rules[request]) store.Rules[request] {
	approval := r.Sub(validateWrite(true, false), keptSpec(),
		store.Field("status.certificate", func(c request) *[]byte { return &c.Status.Certificate }))
	approval.Update = stamp
	return approval
}

// stamp fills in the times of new conditions.
func stamp(c, before request) {
	now := metav1.Now()
	for i := range c.Status.Conditions {
		k := &c.Status.Conditions[i]
		if k.LastUpdateTime.IsZero() {
			k.LastUpdateTime = now
		}
		for _, o := range before.Status.Conditions {
			if k.LastTransitionTime.IsZero() && o.Type == k.Type && o.Status == k.Status {
				k.LastTransitionTime = o.LastTransitionTime
			}
		}
		if k.LastTransitionTime.IsZero() {
			k.LastTransitionTime = now
		}
	}
}

// checked is a subresource that only those may update who have the verb for
// the request's signer.
type checked struct {
	*store.SubREST
	authorizer authorizer.UnconditionalAuthorizer
	verb       string
}

var _ rest.Patcher = (*checked)(nil)

// Update changes the part that the strategy lets through.
func (r *checked) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc,
	update rest.ValidateObjectUpdateFunc, force bool, o *metav1.UpdateOptions) (runtime.Object, bool, error) {
	info = rest.WrapUpdatedObjectInfo(info, func(ctx context.Context, obj, old runtime.Object) (runtime.Object, error) {
		c := old.(*certificatesv1.CertificateSigningRequest)
		if c.UID != "" && !r.may(ctx, c.Spec.SignerName) {
			return nil, apierrors.NewForbidden(certificatesv1.Resource("certificatesigningrequests"), name,
				fmt.Errorf("user not permitted to %s requests with signerName %q", r.verb, c.Spec.SignerName))
		}
		return obj, nil
	})
	return r.SubREST.Update(ctx, name, info, create, update, force, o)
}

// may asks for the signer by name, and for all signers of its domain.
func (r *checked) may(ctx context.Context, signer string) bool {
	u, ok := apirequest.UserFrom(ctx)
	if !ok {
		return false
	}
	domain, _, _ := strings.Cut(signer, "/")
	for _, name := range []string{signer, domain + "/*"} {
		d, _, err := r.authorizer.Authorize(ctx, authorizer.AttributesRecord{
			User: u, Verb: r.verb, APIGroup: certificatesv1.GroupName, APIVersion: "*", Resource: "signers", Name: name, ResourceRequest: true,
		})
		if err == nil && d == authorizer.DecisionAllow {
			return true
		}
	}
	return false
}
