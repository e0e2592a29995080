"""The admin API: JSON under ``/admin/api``, for administrators and their programs."""
