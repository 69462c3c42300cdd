package apiserver

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"slices"
	"time"

	authnv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	auditapi "k8s.io/apiserver/pkg/apis/audit"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	genericapiserver "k8s.io/apiserver/pkg/server"
	genericoptions "k8s.io/apiserver/pkg/server/options"

	"github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// auditMetadata is the policy of an audit log without a policy.
const auditMetadata = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
`

// configureAudit adds the audit log that the options ask for.
func (a *assembly) configureAudit(context.Context) error {
	audit := a.opts.Auth.Audit
	if audit == nil {
		return nil
	}
	if err := a.defaultAuditPolicy(audit); err != nil {
		return err
	}
	if err := audit.ApplyTo(a.config); err != nil {
		return fmt.Errorf("the audit log: %w", err)
	}
	return nil
}

// defaultAuditPolicy makes an audit log without a policy record who did what, without the content.
// k8s.io/apiserver would record nothing, and reads a policy only from a file.
func (s *Server) defaultAuditPolicy(o *genericoptions.AuditOptions) error {
	if o.PolicyFile != "" || o.LogOptions.Path == "" && o.WebhookOptions.ConfigFile == "" {
		return nil
	}
	o.PolicyFile = s.dir.File("audit-policy.yaml")
	return fileio.Replace(o.PolicyFile, []byte(auditMetadata), 0o600)
}

// serverTokenUser begins the name that the audit log has for a server that joins; the ID of its
// token follows.
const serverTokenUser = "system:server-token:"

// Annotations of the audit log about a server that joins.
const (
	auditServer = "fairlead.dev/server"
	auditPeer   = "fairlead.dev/peer"
)

// auditJoining returns what writes the steps of a server that joins into the audit log of c, as
// its policy says: such requests are recognised only by their token, before the filters that
// audit all others.
func auditJoining(c *genericapiserver.Config) func(members.Step) {
	return func(s members.Step) {
		if c.AuditBackend == nil || c.AuditPolicyRuleEvaluator == nil {
			return
		}
		const verb = "post"
		who := &user.DefaultInfo{Name: serverTokenUser + s.Token}
		rule := c.AuditPolicyRuleEvaluator.EvaluatePolicyRule(&authorizer.AttributesRecord{User: who, Verb: verb, Path: s.Path})
		if rule.Level == auditapi.LevelNone || slices.Contains(rule.OmitStages, auditapi.StageResponseComplete) {
			return
		}
		e := &auditapi.Event{
			Level: auditapi.LevelMetadata, AuditID: types.UID(uuid.NewUUID()), Stage: auditapi.StageResponseComplete,
			RequestURI: s.Path, Verb: verb, User: authnv1.UserInfo{Username: who.Name},
			ResponseStatus: &metav1.Status{Code: http.StatusOK}, Annotations: map[string]string{auditServer: s.Server},
		}
		if s.Peer != "" {
			e.Annotations[auditPeer] = s.Peer
		}
		if host, _, err := net.SplitHostPort(s.From); err == nil {
			e.SourceIPs = []string{host}
		}
		e.StageTimestamp = metav1.NewMicroTime(time.Now())
		e.RequestReceivedTimestamp = e.StageTimestamp
		c.AuditBackend.ProcessEvents(e)
	}
}
