// Package accounts issues and authenticates the tokens of ServiceAccounts: JWTs
// that expire, and that end with the object they are bound to.
//
// Issuer signs them, for the subresource serviceaccounts/token. Authenticator
// verifies them and that the objects they name still exist. Discovery serves the
// public keys, so that others can verify them too (OpenID Connect Discovery 1.0).
// Admission sets the account of Pods and mounts its token, and Keeper makes the
// account "default" and the authority's certificate in every namespace.
package accounts
