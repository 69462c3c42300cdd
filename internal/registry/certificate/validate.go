package certificate

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// minExpiration is the shortest life that may be asked for, in seconds.
const minExpiration = 600

func usages() []certificatesv1.KeyUsage {
	return []certificatesv1.KeyUsage{
		certificatesv1.UsageAny, certificatesv1.UsageCRLSign, certificatesv1.UsageCertSign, certificatesv1.UsageClientAuth,
		certificatesv1.UsageCodeSigning, certificatesv1.UsageContentCommitment, certificatesv1.UsageDataEncipherment,
		certificatesv1.UsageDecipherOnly, certificatesv1.UsageDigitalSignature, certificatesv1.UsageEmailProtection,
		certificatesv1.UsageEncipherOnly, certificatesv1.UsageIPsecEndSystem, certificatesv1.UsageIPsecTunnel,
		certificatesv1.UsageIPsecUser, certificatesv1.UsageKeyAgreement, certificatesv1.UsageKeyEncipherment,
		certificatesv1.UsageMicrosoftSGC, certificatesv1.UsageNetscapeSGC, certificatesv1.UsageOCSPSigning, certificatesv1.UsageSMIME,
		certificatesv1.UsageServerAuth, certificatesv1.UsageSigning, certificatesv1.UsageTimestamping,
	}
}

// anyName accepts every name that can stand in a URL.
func anyName(string, bool) []string { return nil }

func validate(c *certificatesv1.CertificateSigningRequest) field.ErrorList {
	errs := store.ValidateMeta(&c.ObjectMeta, false, anyName)
	spec := field.NewPath("spec")
	if _, err := Parse(c); err != nil {
		errs = append(errs, field.Invalid(spec.Child("request"), c.Spec.Request, err.Error()))
	}
	if len(c.Spec.Usages) == 0 {
		errs = append(errs, field.Required(spec.Child("usages"), ""))
	}
	for i, u := range c.Spec.Usages {
		if !slices.Contains(usages(), u) {
			errs = append(errs, field.NotSupported(spec.Child("usages").Index(i), u, usages()))
		}
		if slices.Contains(c.Spec.Usages[:i], u) {
			errs = append(errs, field.Duplicate(spec.Child("usages").Index(i), u))
		}
	}
	errs = append(errs, validateSigner(c.Spec.SignerName, spec.Child("signerName"))...)
	if s := c.Spec.ExpirationSeconds; s != nil && *s < minExpiration {
		errs = append(errs, field.Invalid(spec.Child("expirationSeconds"), *s, "may not specify a duration less than 600 seconds (10 minutes)"))
	}
	errs = append(errs, validateConditions(c, field.NewPath("status", "conditions"))...)
	if err := checkCertificate(c.Status.Certificate); err != nil {
		errs = append(errs, field.Invalid(field.NewPath("status", "certificate"), "<certificate data>", err.Error()))
	}
	return errs
}

// validateSigner wants DOMAIN/PATH.
func validateSigner(name string, path *field.Path) (errs field.ErrorList) {
	if name == "" {
		return field.ErrorList{field.Required(path, "")}
	}
	if name == "kubernetes.io/legacy-unknown" {
		return field.ErrorList{field.Invalid(path, name, "the legacy signerName is not allowed via this API version")}
	}
	domain, rest, ok := strings.Cut(name, "/")
	if !ok || rest == "" || strings.Contains(rest, "/") {
		return field.ErrorList{field.Invalid(path, name, "must be a fully qualified domain and path of the form 'example.com/signer-name'")}
	}
	for _, msg := range utilvalidation.IsDNS1123Subdomain(domain) {
		errs = append(errs, field.Invalid(path, domain, "validating label '"+domain+"': "+msg))
	}
	if !strings.Contains(domain, ".") {
		errs = append(errs, field.Invalid(path, name, "should be a domain with at least two segments separated by dots"))
	}
	for _, msg := range utilvalidation.IsDNS1123Subdomain(rest) {
		errs = append(errs, field.Invalid(path, rest, "validating path: "+msg))
	}
	return errs
}

func validateConditions(c *certificatesv1.CertificateSigningRequest, path *field.Path) (errs field.ErrorList) {
	seen := map[certificatesv1.RequestConditionType]bool{}
	for i, k := range c.Status.Conditions {
		at := path.Index(i)
		if k.Type == "" {
			errs = append(errs, field.Required(at.Child("type"), ""))
		}
		allowed := []corev1.ConditionStatus{corev1.ConditionFalse, corev1.ConditionTrue, corev1.ConditionUnknown}
		switch k.Type {
		case certificatesv1.CertificateApproved, certificatesv1.CertificateDenied, certificatesv1.CertificateFailed:
			allowed = []corev1.ConditionStatus{corev1.ConditionTrue}
		}
		if k.Status == "" {
			errs = append(errs, field.Required(at.Child("status"), ""))
		} else if !slices.Contains(allowed, k.Status) {
			errs = append(errs, field.NotSupported(at.Child("status"), k.Status, allowed))
		}
		if seen[k.Type] {
			errs = append(errs, field.Duplicate(at.Child("type"), k.Type))
		}
		seen[k.Type] = true
	}
	if seen[certificatesv1.CertificateApproved] && seen[certificatesv1.CertificateDenied] {
		errs = append(errs, field.Invalid(path, certificatesv1.CertificateDenied, "Approved and Denied conditions are mutually exclusive"))
	}
	return errs
}

func checkCertificate(data []byte) error {
	for blocks := 0; len(data) > 0; blocks++ {
		b, rest := pem.Decode(data)
		switch {
		case b == nil && blocks == 0:
			return errors.New("must contain at least one CERTIFICATE PEM block")
		case b == nil:
			return nil
		case b.Type != "CERTIFICATE":
			return fmt.Errorf("only CERTIFICATE PEM blocks are allowed, found %q", b.Type)
		case len(b.Headers) != 0:
			return errors.New("no PEM block headers are permitted")
		}
		if _, err := x509.ParseCertificate(b.Bytes); err != nil {
			return err
		}
		data = rest
	}
	return nil
}

// validateWrite returns the validation of the writes by one path: mayDecide by
// the path of approvals, mayIssue by the path of certificates.
func validateWrite(mayDecide, mayIssue bool) func(context.Context, request, request) field.ErrorList {
	return func(_ context.Context, c, before request) field.ErrorList {
		if before == nil {
			return validate(c)
		}
		return validateUpdate(c, before, mayDecide, mayIssue)
	}
}

// validateUpdate keeps decisions: an approval, a denial, a failure and a
// certificate are not taken back, and each comes by its own path.
func validateUpdate(c, before request, mayDecide, mayIssue bool) field.ErrorList {
	errs := append(validate(c), store.ValidateMetaUpdate(&c.ObjectMeta, &before.ObjectMeta)...)
	path := field.NewPath("status", "conditions")
	for _, t := range []certificatesv1.RequestConditionType{certificatesv1.CertificateApproved, certificatesv1.CertificateDenied,
		certificatesv1.CertificateFailed} {
		had, has := find(before, t), find(c, t)
		decides := t != certificatesv1.CertificateFailed
		switch {
		case had != nil && has == nil:
			errs = append(errs, field.Forbidden(path, fmt.Sprintf("updates may not remove a condition of type %q", t)))
		case mayDecide || !decides:
		case had == nil && has != nil:
			errs = append(errs, field.Forbidden(path, fmt.Sprintf("updates may not add a condition of type %q", t)))
		case !equality.Semantic.DeepEqual(had, has):
			errs = append(errs, field.Forbidden(path, fmt.Sprintf("updates may not modify a condition of type %q", t)))
		}
	}
	if bytes.Equal(c.Status.Certificate, before.Status.Certificate) {
		return errs
	}
	at := field.NewPath("status", "certificate")
	if !mayIssue {
		errs = append(errs, field.Forbidden(at, "updates may not set certificate content"))
	} else if len(before.Status.Certificate) > 0 {
		errs = append(errs, field.Forbidden(at, "updates may not modify existing certificate content"))
	}
	return errs
}

func find(c *certificatesv1.CertificateSigningRequest,
	t certificatesv1.RequestConditionType) *certificatesv1.CertificateSigningRequestCondition {
	for i := range c.Status.Conditions {
		if c.Status.Conditions[i].Type == t {
			return &c.Status.Conditions[i]
		}
	}
	return nil
}
